"""Checkpoints are written while training continues: in pieces, by the ranks themselves on a shared disk, and not too often."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Make
from safetensors.torch import load_file
from simulated import LINK, parameters, run

from nmt_train.common.errors import UserError
from nmt_train.run import checkpoint
from nmt_train.run.folder import Run
from nmt_train.simulation.virtual_transport import VirtualTransport
from nmt_train.training import checkpoint_writer, setup
from nmt_train.training.leader import Leader
from nmt_train.training.start import start
from nmt_train.training.worker import Worker
from nmt_train.transport import Tag

MODES = ["sync", "vanilla", "sparse-overlap", "low-bit", "easgd"]


def full(*arguments: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def tensors(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {file.name: load_file(file) for file in sorted(folder.glob("*.safetensors"))}


def equal(one: Path, other: Path) -> bool:
    left, right = tensors(one), tensors(other)
    return left.keys() == right.keys() and all(
        left[file].keys() == right[file].keys() and all(torch.equal(left[file][name], right[file][name]) for name in left[file])
        for file in left
    )


@pytest.fixture
def state_messages(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The elements of every vector that is sent as state of a rank, in the order of sending."""
    sent: list[int] = []
    send = VirtualTransport.send

    def recorded(its: VirtualTransport, to: int, tag: Tag, message: Any) -> Any:
        if tag == Tag.STATE:
            sent.extend(tensor.numel() for tensor in message.tensors if tensor.is_floating_point())
        return send(its, to, tag, message)

    monkeypatch.setattr(VirtualTransport, "send", recorded)
    return sent


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_no_message_of_a_checkpoint_grows_with_the_model_and_the_run_resumes_bit_for_bit(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state_messages: list[int], mode: str
) -> None:
    whole = run(make, tmp_path / "whole", [1, 1, 1], mode=mode, stop__after="20u", checkpoint__every="10u")
    monkeypatch.setattr("nmt_train.training.snapshot._PIECE", 500)
    state_messages.clear()
    pieces = run(make, tmp_path / "pieces", [1, 1, 1], mode=mode, stop__after="10u", checkpoint__every="10u")
    run(make, pieces, [1, 1, 1], mode=mode, stop__after="20u", checkpoint__every="10u")
    assert max(state_messages) == 500
    if mode in ("sync", "low-bit"):  # asynchronous workers continue in another order
        assert parameters(pieces) == parameters(whole)
    assert equal(whole / "checkpoints" / "10", pieces / "checkpoints" / "10")


@pytest.mark.slow
def test_a_rank_that_sees_the_run_folder_writes_the_state_of_its_worker_there(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state_messages: list[int]
) -> None:
    sent = run(make, tmp_path / "sent", [1, 1], mode="sparse-overlap", stop__after="6u")
    over_the_network = sum(state_messages)
    state_messages.clear()
    monkeypatch.setattr(setup, "Leader", lambda *arguments: Leader(*arguments[:5]))
    shared = run(make, tmp_path / "shared", [1, 1], mode="sparse-overlap", stop__after="6u")
    assert equal(sent / "last", shared / "last")
    assert checkpoint.load(shared / "last").has("worker-1")
    assert sum(state_messages) < over_the_network / 2


@pytest.mark.slow
def test_a_rank_that_cannot_write_to_the_run_folder_sends_its_state(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = run(make, tmp_path / "sent", [1, 1], mode="sparse-overlap", stop__after="6u")
    monkeypatch.setattr(setup, "Leader", lambda *arguments: Leader(*arguments[:5]))
    monkeypatch.setattr(checkpoint_writer, "TensorFile", full)
    refused = run(make, tmp_path / "refused", [1, 1], mode="sparse-overlap", stop__after="6u")
    assert equal(sent / "last", refused / "last")


def test_a_single_device_trains_while_its_checkpoint_is_written(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    finish, decay, trained = checkpoint.Draft.finish, Worker.decay, threading.Event()

    def waiting(its: checkpoint.Draft, facts: Any, alive: Any) -> None:
        if facts["progress"]["updates"] == 4:
            assert trained.wait(60), "training stands while the checkpoint is written"
        finish(its, facts, alive)

    def counted(its: Worker, epochs: float) -> None:
        if its.strategy.updates >= 6:
            trained.set()
        decay(its, epochs)

    monkeypatch.setattr(checkpoint.Draft, "finish", waiting)
    monkeypatch.setattr(Worker, "decay", counted)
    config = make(stop__after="8u", checkpoint__every="4u")
    assert start(config, force=False, overwrite=False) == 0
    assert [path.name for path in Run(Path(config.run)).checkpoints()] == ["4", "8"]


def test_training_ends_with_the_sentence_of_a_checkpoint_that_cannot_be_written(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(UserError, match="checkpoints/4: the checkpoint could not be written: No space left on device"):
        start(make(stop__after="40u", checkpoint__every="4u"), force=False, overwrite=False)


def test_a_disk_without_space_for_a_checkpoint_is_warned_of_before_training(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    for free, warned in ((usage.free, False), (1000, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        config = make(stop__after="1u")
        assert start(config, force=False, overwrite=True) == 0
        log = (Path(config.run) / "train.log").read_text(encoding="utf-8")
        assert ("for each checkpoint, but its disk has 0.0 MB free; free some space" in log) == warned


def test_a_checkpoint_that_is_being_written_is_completed_if_training_fails(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    finish, decay, failed = checkpoint.Draft.finish, Worker.decay, threading.Event()

    def waiting(its: checkpoint.Draft, facts: Any, alive: Any) -> None:
        assert failed.wait(60)
        finish(its, facts, alive)

    def fails(its: Worker, epochs: float) -> None:
        decay(its, epochs)
        if its.strategy.updates >= 5:
            failed.set()
            raise UserError("this batch fails")

    monkeypatch.setattr(checkpoint.Draft, "finish", waiting)
    monkeypatch.setattr(Worker, "decay", fails)
    config = make(stop__after="8u", checkpoint__every="4u")
    with pytest.raises(UserError, match="this batch fails"):
        start(config, force=False, overwrite=False)
    assert checkpoint.load(Run(Path(config.run)).checkpoint(4)).facts["progress"]["updates"] == 4


@pytest.mark.slow
def test_checkpoints_in_seconds_take_at_most_a_twentieth_of_the_time(make: Make, tmp_path: Path) -> None:
    folder = run(make, tmp_path / "run", [1, 1], mode="sparse-overlap", stop__after="40s", checkpoint__every="1s",
                 checkpoint__keep=100, places=LINK)  # fmt: skip
    times = [checkpoint.load(path).facts["progress"]["seconds"] for path in Run(folder).checkpoints()]
    assert len(times) >= 2
    vectors = tensors(folder / "last")
    sent = sum(tensor.nbytes for tensor in vectors["worker-1.safetensors"].values())
    assert min(later - earlier for earlier, later in pairwise(times[:-1])) >= 20 * sent / 100e3
