"""Workers that join in waves: when, how many, and that every batch is still trained on exactly once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Make
from simulated import FAST, events, parameters, run

from nmt_train import config as configuration
from nmt_train.common.errors import UserError
from nmt_train.config_text import to_yaml
from nmt_train.corpus.data_shard import DataShard, Position
from nmt_train.run.progress import Progress
from nmt_train.server.every_step import EveryStep
from nmt_train.strategy.staged_join import Waves
from nmt_train.training.worker import Worker

pytestmark = pytest.mark.slow

WAVES = {1: "0u", 2: "8u", 3: "20u"}
SPREAD = {"server__join": WAVES, "log__every": "1u", "stop__after": "60u"}


def test_waves_say_how_many_workers_train() -> None:
    waves = Waves.parse({"4": "0u", "8": "2000u", "16": "10Ku"})
    assert [waves.workers(Progress(updates=n)) for n in (0, 1999, 2000, 9999, 10_000)] == [4, 4, 8, 8, 16]
    assert (waves.most, str(waves)) == (16, "{4: 0u, 8: 2000u, 16: 10Ku}")
    assert Waves.parse(str(waves)) == waves
    assert Waves.parse("{3: 0e}").workers(Progress(updates=10**6)) == 3


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("soon", "'soon' is not waves of workers: write workers and when"),
        ({"4": "100u"}, "does not say how many workers begin"),
        ({}, "does not say how many workers begin"),
        ({"0": "0u", "4": "1u"}, "does not say how many workers begin"),
        ({"4": "0u", "2": "100u"}, "each wave needs more workers, and comes later"),
        ({"4": "0u", "8": "200u", "9": "100u"}, "each wave needs more workers, and comes later"),
        ({"4": "0u", "8": "200u", "9": "1e"}, "counted in different units"),
        ({"4": "0u", "8": "late"}, "is not waves of workers .*late.*: write workers and when"),
        ({"four": "0u"}, "is not waves of workers"),
    ],
)
def test_what_waves_cannot_be_is_said_in_one_sentence(given: Any, sentence: str) -> None:
    values = {"server": {"join": given}, "corpus": {"train": ["a", "b"], "valid": ["a", "b"]}, "stop": {"after": "1e"}}
    with pytest.raises(UserError, match=f"server.join: .*{sentence}") as error:
        configuration.validate(values, {})
    assert "\n" not in str(error.value)


def test_waves_survive_being_written_down(make: Make) -> None:
    made = make(**SPREAD)
    assert configuration.validate(configuration.plain(made), {}) == made
    assert "join: '{1: 0u, 2: 8u, 3: 20u}'" in to_yaml(made)


def test_waves_replace_those_of_an_earlier_file_and_those_of_the_command_line_all(tmp_path: Path) -> None:
    file = tmp_path / "config.yml"
    file.write_text("corpus: {train: [a, b], valid: [a, b]}\nstop: {after: 1e}\nserver: {join: {4: 0u, 8: 200u}}\n")
    loaded = configuration.load([str(file)], {"server.join": "{2: 0u, 3: 10u}"})
    assert str(loaded.server.join) == "{2: 0u, 3: 10u}"
    later = tmp_path / "later.yml"
    later.write_text("server: {join: {2: 0u}, bundle: 3}\n")
    loaded = configuration.load([str(file), str(later)], {})
    assert (str(loaded.server.join), loaded.server.bundle) == ("{2: 0u}", 3)


def busy(folder: Path) -> list[int]:
    """After each log line, how many ranks had computed since the one before."""
    return [sum(rank["words_per_second"] > 0 for rank in event["ranks"]) for event in events(folder, "ranks")]


@pytest.mark.parametrize("mode", ["vanilla", "overlap", "sparse", "downpour", "strom"])
def test_later_workers_compute_nothing_until_their_wave(make: Make, tmp_path: Path, mode: str) -> None:
    spread = SPREAD if mode != "strom" else {**SPREAD, "server__join": None, "peers__join": WAVES}
    found = run(make, tmp_path / mode, [2, 1], mode=mode, **spread)
    said = (found / "train.log").read_text(encoding="utf-8")
    assert [said.count(f"{workers} workers train from now on") for workers in (1, 2, 3)] == [0, 1, 1]
    computing = busy(found)
    assert computing[0] == 1
    assert max(computing) == 3
    first = {event["update"]: event for event in events(found, "ranks") if event["update"] <= 8}
    assert all(rank["words_per_second"] == 0 for event in first.values() for rank in event["ranks"][1:])
    assert parameters(found) == parameters(run(make, tmp_path / "again", [2, 1], mode=mode, **spread))


@pytest.mark.parametrize("wave", [11, 15, 16, 39])
def test_a_worker_pulls_the_parameters_before_it_begins(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wave: int
) -> None:
    """Also if the pushes that were in flight when a checkpoint began reach the number of updates at which it joins."""
    pulled: dict[Any, bool] = {}
    began: list[bool] = []
    assign, refresh, settle = Worker.assign, EveryStep.refresh, EveryStep.prepare_snapshot

    def assigned(worker: Worker, data_shard: DataShard, position: Position) -> None:
        if getattr(worker, "data_shard", data_shard).idle and not data_shard.idle:
            began.append(pulled[worker.strategy])
        assign(worker, data_shard, position)

    def refreshed(strategy: EveryStep) -> None:
        pulled[strategy] = True
        refresh(strategy)

    def settled(strategy: EveryStep) -> None:
        pulled[strategy] = False
        settle(strategy)

    monkeypatch.setattr(Worker, "assign", assigned)
    monkeypatch.setattr(EveryStep, "refresh", refreshed)
    monkeypatch.setattr(EveryStep, "prepare_snapshot", settled)
    run(make, tmp_path / "run", [1, 1, 1, 1], mode="vanilla", stop__after="60u", checkpoint__every="4u", log__every="1u",
        server__join={3: "0u", 4: f"{wave}u"})  # fmt: skip
    assert began == [True]


@pytest.mark.parametrize("mode", ["vanilla", "sparse"])
def test_waves_leave_no_batch_out_and_take_none_twice(make: Make, tmp_path: Path, mode: str) -> None:
    whole = run(make, tmp_path / "alone", [1], mode=mode, stop__after="3e")
    spread = run(make, tmp_path / "spread", [2, 1], mode=mode, **SPREAD | {"stop__after": "3e"})
    counted = [json.loads((folder / "last" / "checkpoint.json").read_text())["progress"] for folder in (whole, spread)]
    for key in ("tokens", "source_tokens", "epochs"):
        assert counted[0][key] == counted[1][key], key


@pytest.mark.parametrize("mode", ["vanilla", "sparse", "thesis-sparse", "staleness-aware"])
def test_a_run_that_was_interrupted_goes_on_with_the_workers_that_had_joined(make: Make, tmp_path: Path, mode: str) -> None:
    options = {"mode": mode, "checkpoint__every": "4u", "places": FAST, **SPREAD}
    whole = run(make, tmp_path / "whole", [2, 1], **options)
    for stop in ("4u", "12u", "60u"):
        parts = run(make, tmp_path / "parts", [2, 1], **options | {"stop__after": stop})
    assert parameters(parts) == parameters(whole)


def test_a_worker_that_joins_in_a_later_epoch_of_a_resumed_run_trains(make: Make, tmp_path: Path) -> None:
    one = run(make, tmp_path / "one", [1], mode="vanilla", stop__after="1e")
    batches = json.loads((one / "last" / "checkpoint.json").read_text())["progress"]["updates"]
    waves = {1: "0u", 2: f"{3 * batches + batches // 2}u"}
    for stop in ("3e", "5e"):
        found = run(make, tmp_path / "two", [1, 1], mode="vanilla", server__join=waves, stop__after=stop, log__every="1u")
    assert max(busy(found)) == 2


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"server__join": {2: "0u", 4: "9u"}}, "server.join: 4 workers are to join, but this run has 3 ranks"),
        ({"mode": "sync"}, "server.join: the settings of mode sync are in section replicas; remove it"),
        ({"mode": "backup"}, "server.join: lets workers join later, but mode backup needs all from the start"),
        ({"mode": "easgd"}, "server.join: not with the local steps of mode easgd"),
        ({"server__per": "node"}, "server.join: lets single devices join, but server.per is node"),
    ],
)
def test_waves_that_cannot_be_are_refused(make: Make, tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        run(make, tmp_path / "run", [2, 1], **{"mode": "vanilla", **SPREAD, **changes})
