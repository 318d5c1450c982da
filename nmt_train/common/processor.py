"""The type of this machine's processor."""

from __future__ import annotations

import platform

from llvmlite.binding import get_host_cpu_name


def processor() -> str:
    """The name that compilers use, such as znver4; processors of the same name have the same instructions."""
    return str(get_host_cpu_name()) or platform.machine()
