"""Scores translations by a command of the user, such as one that computes COMET."""

from __future__ import annotations

import math
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

_LOOK = 0.2  # seconds between two looks at whether the command has ended


class CommandFailed(Exception):
    """The command gave no score; the text says why."""


class Stopped(Exception):
    """The command was stopped on request."""


def external_score(command: str, texts: Mapping[str, Sequence[str]], limit: float, asked_to_stop: Callable[[], bool]) -> float:
    """Run the shell command `command`, and return the number in the last line of its output.

    texts: sentences by name; `{name}` in the command stands for a file with them, one per line. limit: the longest time
    [seconds]. Raises CommandFailed, or Stopped soon after `asked_to_stop` returns true.
    """
    with tempfile.TemporaryDirectory(prefix="nmt_train-") as folder:
        for name, lines in texts.items():
            path = Path(folder) / name
            path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
            command = command.replace(f"{{{name}}}", shlex.quote(str(path)))
        with (
            open(Path(folder) / "output", "w+", encoding="utf-8", errors="replace") as output,
            open(Path(folder) / "errors", "w+", encoding="utf-8", errors="replace") as errors,
        ):
            process = subprocess.Popen(
                command, shell=True, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
            )
            try:
                _wait(process, limit, asked_to_stop)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # also what it has left running
                process.wait()
            last, complaint = _last_line(output), _last_line(errors)
    if process.returncode:
        raise CommandFailed(f"exit status {process.returncode}: {complaint or last or 'no output'}")
    try:
        score = float(last)
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise CommandFailed(f"the last line of its output is not a finite number: {last[:200]!r}")
    return score


def _last_line(file: TextIO) -> str:
    file.seek(0)
    lines = file.read().strip().splitlines()
    return lines[-1] if lines else ""


def _wait(process: subprocess.Popen[bytes], limit: float, asked_to_stop: Callable[[], bool]) -> None:
    end = time.monotonic() + limit
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK)
            return
        if asked_to_stop():
            raise Stopped
        if time.monotonic() > end:
            raise CommandFailed(f"not finished after {limit:.0f} s (validation.command_limit)")
