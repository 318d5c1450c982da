"""Whatever standard output and standard error are, a command does its work and ends with its own status."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COMMAND = """
import sys
from nmt_train import cli
from nmt_train.common.errors import UserError
from nmt_train.common.streams import tell
def command(arguments):
    tell("begun")
    {}
    return 0
sys.exit(cli.run(command, []))
"""


def ran(body: str, redirected: str = "", **environment: str) -> subprocess.CompletedProcess[bytes]:
    """The end of a command with this body."""
    shell = ["bash", "-c", f'exec "$0" -c "$1" {redirected}', sys.executable, COMMAND.format(body)]
    return subprocess.run(shell, capture_output=True, env=os.environ | environment, check=False)


def test_characters_that_the_terminal_lacks_are_escaped() -> None:
    done = ran(r"print('l\xe4ufe \u732b \U0001f408')", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (0, rb"l\xe4ufe \u732b \U0001f408" + b"\n")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_path_of_any_bytes_is_printed_as_it_is(encoding: str) -> None:
    done = ran(r"import os; print(os.fsdecode(b'run-\xff'))", PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stdout) == (0, b"run-\xff\n")


def test_a_full_standard_error_changes_nothing() -> None:
    done = ran("print('done')", "2> /dev/full")
    assert (done.returncode, done.stdout) == (0, b"done\n")


@pytest.mark.parametrize(
    ("body", "status"), [("raise UserError('wrong')", 2), ("raise ZeroDivisionError", 1), ("print('x' * 10**6)", 0)]
)
@pytest.mark.parametrize("redirected", ["2> /dev/full", "2>&-"])
def test_the_status_says_how_a_command_ended_although_nobody_reads_why(body: str, status: int, redirected: str) -> None:
    assert ran(body, redirected).returncode == status


def test_a_full_standard_output_is_an_error_with_one_sentence() -> None:
    done = ran("print('table')", "> /dev/full")
    assert (done.returncode, done.stderr) == (
        2, b"begun\nerror: output: No space left on device; free some space on its disk\n",
    )  # fmt: skip
