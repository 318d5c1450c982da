"""What the environment of a process says about how it was started."""

from __future__ import annotations

import importlib
import os
import pty
import subprocess
import sys

import pytest
from conftest import Make
from written import written

from nmt_train import cli
from nmt_train.common import launcher

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


@pytest.mark.parametrize("value", ["", "two", "-1", "2(x3)"])
def test_a_variable_of_slurm_or_mpi_without_a_number_says_nothing(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_RESTART_COUNT", "SLURM_LOCALID", "MPI_LOCALRANKID"):
        monkeypatch.setenv(name, value)
    assert (launcher.tasks(), launcher.queued_again(), launcher.local_rank()) == (0, False, 0)


@pytest.mark.parametrize("name", ["PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE"])
def test_an_empty_variable_of_a_launcher_is_as_good_as_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "")
    assert not launcher.launched()
    monkeypatch.setenv(name, "0")
    assert launcher.launched()


@pytest.mark.parametrize("command", ["train", "simulate"])
def test_torchrun_is_refused_in_one_sentence(
    command: str, make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2"), ("TORCHELASTIC_RUN_ID", "none")):
        monkeypatch.setenv(name, value)
    module = importlib.import_module(f"nmt_train.cli.{command}")
    assert cli.run(module.command, ["--config", written(make())]) == 2
    assert "error: torchrun started 2 processes, but ranks" in capsys.readouterr().err


def test_a_single_process_of_torchrun_and_ranks_of_mpirun_inside_it_are_as_good_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "1")
    launcher.refuse_torchrun()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    launcher.refuse_torchrun()
