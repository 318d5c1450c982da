"""Exceptions for what a user can mend; the console commands print their sentence and exit with their status."""

from __future__ import annotations

import os

TRY_AGAIN = 75  # the exit status where a new start may help: EX_TEMPFAIL of sysexits.h


class UserError(Exception):
    """What is wrong, where (file, line, key, host) and what to do, in one sentence."""

    status = 2


class NotFinite(UserError):
    """A loss or a gradient is infinite or not a number; the message says in which update and batch."""


def unreadable(path: str | os.PathLike[str], error: Exception) -> str:
    """What is wrong with a file, and where it was looked for: paths are relative to the working directory."""
    path = os.path.expanduser(path)
    where = "" if os.path.isabs(path) else f" ({os.path.abspath(path)})"
    return f"{path}: {getattr(error, 'strerror', None) or error}{where}"
