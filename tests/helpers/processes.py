"""Processes that tests start, which never outlive them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path


def finish(arguments: Sequence[str], environment: Mapping[str, str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. One that takes longer than `seconds` is killed with all its processes; AssertionError has
    what they have said, and the stacks of the ones running Python.
    """
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**environment, "PYTHONFAULTHANDLER": "1"},
    )  # fmt: skip
    try:
        said, complained = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        for number in (signal.SIGABRT, signal.SIGKILL):  # the first makes Python print its stacks
            for one in session(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(one, number)
            time.sleep(2)
        raise AssertionError(f"{arguments} has not ended after {seconds} s: {process.communicate(timeout=10)}") from None
    return subprocess.CompletedProcess(arguments, process.returncode, said, complained)


def session(leader: int) -> list[int]:
    """The processes in the session of this leader."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            if int(fields[3]) == leader and fields[0] != "Z":
                found.append(int(folder.name))
    return found
