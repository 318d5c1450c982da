"""What the environment of a process says about how it was started."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

CHILD = "from nmt_train.common.launcher import terminal; print(terminal() is not None)"
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[2]], stderr=subprocess.PIPE, check=True)"


@pytest.mark.parametrize(("command", "found"), [("prterun", True), ("bash", False)])
def test_the_terminal_is_that_of_mpirun_and_not_that_of_a_shell_that_redirects_it(command: str, found: bool) -> None:
    """A process whose standard error is a pipe is started by another on a terminal, which has `command` among its words."""
    ours, theirs = pty.openpty()
    try:
        shown = subprocess.run(
            [sys.executable, "-c", PARENT, command, CHILD], stderr=theirs, stdout=subprocess.PIPE, text=True, check=True
        )
    finally:
        os.close(ours)
        os.close(theirs)
    assert shown.stdout == f"{found}\n"


def test_a_closed_standard_error_is_no_terminal() -> None:
    shown = subprocess.run(["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, CHILD], stdout=subprocess.PIPE, text=True)
    assert (shown.returncode, shown.stdout) == (0, "False\n")
