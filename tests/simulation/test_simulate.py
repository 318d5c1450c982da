"""Training on a virtual cluster: what must hold in every mode, and how long things take."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import Make
from poisoned import poisoned
from simulated import AT_ONCE, BUSY, FAST, IN_STEP, LINK, REPEATED, events, parameters, run, trace, words
from virtual import cluster

from nmt_train.codec.selection import Sample
from nmt_train.common.errors import UserError
from nmt_train.modes.table import MODES
from nmt_train.run import checkpoint
from nmt_train.simulation.cluster import Cost, Crash, DeviceConfig, LinkConfig
from nmt_train.simulation.simulate import simulate
from nmt_train.training.leader import Leader
from nmt_train.training.start import start

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mode", MODES)
def test_one_simulated_worker_is_one_real_worker_bit_for_bit(make: Make, tmp_path: Path, mode: str) -> None:
    same = {
        "mode": mode,
        "overlap__bound": 1,
        "local__every": 3 if mode in REPEATED else None,
        "stop__after": "2e",
    }  # real background tasks are quick or slow; bound, they are in step
    assert start(dataclasses.replace(make(**same), run=str(tmp_path / "real")), False, False) == 0
    simulated = run(make, tmp_path / "simulated", [1], **same)
    assert parameters(simulated) == parameters(tmp_path / "real")


@pytest.mark.parametrize("mode", ["sync", "powersgd", "low-bit", "backup", "sparse"])
def test_one_worker_that_exchanges_every_gradient_trains_as_in_mode_single(make: Make, tmp_path: Path, mode: str) -> None:
    single, alone = (run(make, tmp_path / name, [1], mode=name, stop__after="2e") for name in ("single", mode))
    assert parameters(alone) == parameters(single)


def test_a_batch_that_is_not_finite_is_named_although_its_sum_was_sent_later(make: Make, tmp_path: Path) -> None:
    slow = {"network": LinkConfig("10 kB/s", "1ms"), "inside": LinkConfig("1 MB/s", "0.1ms")}
    common = {"mode": "overlap", "optimizer__not_finite": "skip", "log__every": "1u", "places": slow}
    with poisoned([12], float("nan")):
        folder = run(make, tmp_path / "run", [1, 1], stop__after="9e", **common)
    said = (folder / "train.log").read_text(encoding="utf-8")
    assert re.search(
        r"skipped: rank \d on host node\d, update \d+, batch \d+ of epoch \d+ \(corpus.train, .*\): cost nan", said
    )
    assert any(int(steps) > 2 for event in events(folder, "ranks") for rank in event["ranks"] for steps in rank["steps"])


@pytest.mark.parametrize("mode", MODES)
def test_the_same_seed_gives_the_same_trace_and_parameters_byte_for_byte(make: Make, tmp_path: Path, mode: str) -> None:
    nodes = [2] if mode == "single" else [2, 1]
    one, other = (run(make, tmp_path / name, nodes, mode=mode, trace=True, stop__after="1e") for name in ("one", "other"))
    assert parameters(one) == parameters(other)
    assert trace(one) == trace(other)


@pytest.mark.parametrize(("mode", "delay"), [*((mode, None) for mode in REPEATED), ("diloco", 2), ("sparse-local", 3)])
def test_interrupted_and_resumed_is_uninterrupted_bit_for_bit(make: Make, tmp_path: Path, mode: str, delay: int | None) -> None:
    """A checkpoint on its way to rank 0 takes a part of the network, so that workers at their own pace need a fast one."""
    nodes = [2] if mode == "single" else [2, 1]
    common = {"mode": mode, "checkpoint__every": "9u", "batch__tokens": 300, "dropping__up": 0.9}
    common |= {"local__delay": delay, "places": LINK if mode in IN_STEP else FAST}
    whole = run(make, tmp_path / "whole", nodes, stop__after="20u", **common)
    run(make, tmp_path / "parts", nodes, stop__after="9u", **common)
    parts = run(make, tmp_path / "parts", nodes, stop__after="20u", **common)
    assert parameters(parts) == parameters(whole)


@pytest.mark.parametrize(
    "changes",
    [
        {"mode": "powersgd", "batch__accumulate": 2},
        {"mode": "sparse-local", "replicas__codec": "threshold"},
        {"mode": "sparse-local", "replicas__codec": "top-k"},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)  # fmt: skip
def test_what_workers_owe_and_sample_survives_an_interruption(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    for codec in ("topk", "strom_threshold"):  # the model has fewer elements than are sampled
        monkeypatch.setattr(f"nmt_train.codec.{codec}.Sample", lambda size=100: Sample(100))
    common = {"checkpoint__every": "6u", "dropping__up": 0.9, "batch__tokens": 300, **changes}
    whole = run(make, tmp_path / "whole", [1, 1, 1], stop__after="14u", **common)
    run(make, tmp_path / "parts", [1, 1, 1], stop__after="6u", **common)
    assert parameters(run(make, tmp_path / "parts", [1, 1, 1], stop__after="14u", **common)) == parameters(whole)


def test_a_signal_saves_and_stops_so_that_nothing_is_lost(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = signal.SIGTERM
    whole = run(make, tmp_path / "whole", [2, 1], mode="sync", stop__after="20u")
    step_done, steps = Leader.step_done, count(1)

    def interrupted(leader: Leader, updated: bool) -> None:
        step_done(leader, updated)
        if next(steps) == 7:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(Leader, "step_done", interrupted)
        config = dataclasses.replace(make(mode="sync", stop__after="20u"), run=str(tmp_path / "parts"))
        assert simulate(config, cluster([2, 1], BUSY, **LINK), False, False) == 128 + number
    assert checkpoint.load(tmp_path / "parts" / "last").facts["progress"]["updates"] < 20
    assert parameters(run(make, tmp_path / "parts", [2, 1], mode="sync", stop__after="20u")) == parameters(whole)


@pytest.mark.parametrize("mode", ["diloco-async", "sparse-local-async"])
def test_workers_that_do_not_wait_for_each_other_obey_a_signal_between_two_exchanges(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    step_done, steps = Leader.step_done, count(1)

    def interrupted(leader: Leader, updated: bool) -> None:
        if next(steps) == 7:
            leader.ask(signal.SIGTERM)
        step_done(leader, updated)

    monkeypatch.setattr(Leader, "step_done", interrupted)
    config = dataclasses.replace(make(mode=mode, local__every=40, stop__after="9e"), run=str(tmp_path / "run"))
    assert simulate(config, cluster([1, 1], BUSY, **LINK), False, False) == 128 + signal.SIGTERM
    assert next(steps) == 8


@pytest.mark.parametrize("mode", ["vanilla", "sparse-overlap"])
def test_fewer_shards_than_ranks_change_what_is_sent_but_not_what_holds(make: Make, tmp_path: Path, mode: str) -> None:
    common = {"mode": mode, "checkpoint__every": "9u", "dropping__up": 0.9, "places": FAST}
    whole = run(make, tmp_path / "whole", [2, 1], stop__after="20u", server__shards=1, **common)
    run(make, tmp_path / "parts", [2, 1], stop__after="9u", server__shards=1, **common)
    parts = run(make, tmp_path / "parts", [2, 1], stop__after="20u", server__shards=1, **common)
    assert parameters(parts) == parameters(whole)
    ranks = events(
        run(make, tmp_path / "traced", [2, 1], stop__after="20u", server__shards=1, log__every="20u", **common), "ranks"
    )
    assert [("answer" in rank["sent"]) for rank in ranks[-1]["ranks"]] == [True, False, False]


@pytest.mark.parametrize("mode", ["vanilla", "sparse-overlap", "strom", "sync", "sparse-local"])
def test_validation_changes_nothing(make: Make, tmp_path: Path, mode: str) -> None:
    """Whatever the network where all exchange at the same step, else on one that is fast enough for what is validated. (Small
    batches, here and above, only save time.)
    """
    nodes, places = ([2], FAST) if mode == "single" else ([2, 1], LINK if mode in IN_STEP else FAST)
    common = {"mode": mode, "stop__after": "24u", "batch__tokens": 300, "dropping__up": 0.9, "places": places}
    often = run(make, tmp_path / "often", nodes, validation__every="4u", **common)
    never = run(make, tmp_path / "never", nodes, validation__every="1000u", **common)
    assert len(events(often, "validation")) >= 5  # updates of others may pass an interval between two steps
    assert parameters(often) == parameters(never)


@pytest.mark.parametrize("mode", ["vanilla", "sparse-overlap"])
def test_a_validated_copy_of_the_parameters_takes_its_time_on_the_network(make: Make, tmp_path: Path, mode: str) -> None:
    folder = run(make, tmp_path / "run", [1, 1], mode=mode, stop__after="40u", validation__every="4u", log__every="4u")
    ranks = {rank: sent_of(folder, rank) for rank in (0, 1)}
    copies = len(events(folder, "validation"))
    assert ranks[1]["pulled"] >= copies * shard_bytes(folder, 2), "the other machine sends its part for every validation"
    assert ranks[0]["pulled"] <= (copies + 1) * shard_bytes(folder, 2), "but gets nothing for it"


@pytest.mark.parametrize("mode", ["vanilla", "sparse-overlap"])
def test_where_snapshots_are_free_validation_changes_nothing_on_any_network(make: Make, tmp_path: Path, mode: str) -> None:
    common = {"mode": mode, "stop__after": "40u", "log__every": "10u", "places": {**LINK, "snapshots": "free"}}
    often = run(make, tmp_path / "often", [1, 1], validation__every="4u", **common)
    never = run(make, tmp_path / "never", [1, 1], validation__every="1000u", **common)
    assert parameters(often) == parameters(never)
    assert events(often, "train")[-1]["seconds"] == events(never, "train")[-1]["seconds"]


def sent_of(folder: Path, rank: int) -> dict[str, int]:
    """Bytes that a rank has sent, by kind of message."""
    found: dict[str, int] = {}
    for event in events(folder, "ranks"):
        for kind, (_, size) in event["ranks"][rank]["sent"].items():
            found[kind] = found.get(kind, 0) + size
    return found


def test_validation_costs_no_virtual_time(make: Make, tmp_path: Path) -> None:
    without = run(make, tmp_path / "without", [1], stop__after="12u")
    with_it = run(make, tmp_path / "with", [1], stop__after="12u", validation__every="2u")
    last = events(with_it, "validation")[-1]
    assert last["seconds"] == last["training_seconds"]
    assert parameters(without) == parameters(with_it)


def test_a_step_alone_takes_the_sum_of_its_parts(make: Make, tmp_path: Path) -> None:
    device = DeviceConfig(forward=Cost("1s", "1ms"), backward=Cost("2s", "2ms"), update=Cost("0.5s", "0s"))
    folder = run(make, tmp_path / "run", [1], device, stop__after="6u", log__every="6u")
    event = events(folder, "train")[-1]
    assert event["seconds"] == pytest.approx(6 * 3.5 + 0.003 * event["words"])


def test_vanilla_takes_computing_plus_both_ways_plus_the_updates(make: Make, tmp_path: Path) -> None:
    device = DeviceConfig(forward=Cost("1s", "0s"), backward=Cost("2s", "0s"), update=Cost("0.5s", "0s"))
    folder = run(make, tmp_path / "run", [1, 1], device, mode="vanilla", stop__after="20u", trace=True, places=AT_ONCE)
    half = shard_bytes(folder, 2) / 100e3
    # Both workers are in step: each updates its own shard while its gradient travels, then with the other's.
    expected = 3 + max(0.5, half) + 0.5 + half
    assert step_time(folder) == pytest.approx(expected, abs=1e-5)


def test_overlapped_steps_take_no_more_than_computing_when_that_is_longer(make: Make, tmp_path: Path) -> None:
    device = DeviceConfig(forward=Cost("1s", "0s"), backward=Cost("2s", "0s"))
    folder = run(make, tmp_path / "run", [1, 1], device, mode="overlap", stop__after="20u", trace=True)
    assert step_time(folder) == pytest.approx(3, abs=1e-6)


def test_bounded_overlap_takes_the_longer_of_computing_and_exchanging(make: Make, tmp_path: Path) -> None:
    device = DeviceConfig(forward=Cost("10ms", "0s"), backward=Cost("20ms", "0s"))
    folder = run(make, tmp_path / "run", [1, 1], device, mode="overlap", overlap__bound=1, stop__after="20u", trace=True,
                 places=AT_ONCE)  # fmt: skip
    assert step_time(folder) == pytest.approx(max(0.03, 2 * shard_bytes(folder, 2) / 100e3), abs=1e-5)


def shard_bytes(folder: Path, shards: int) -> float:
    """Of a shard's parameters; the demo model's number of elements is even."""
    from safetensors import safe_open

    with safe_open(folder / "last" / "parameters.safetensors", "pt") as file:
        return 4 * sum(file.get_tensor(name).numel() for name in file.keys()) / shards  # noqa: SIM118


def seconds(folder: Path) -> float:
    """Virtual seconds of the last line of training."""
    return float(events(folder, "train")[-1]["seconds"])


def step_time(folder: Path) -> float:
    """Median seconds from one forward pass of rank 0 to the next."""
    starts = [span["start"] for span in map(json.loads, (folder / "trace" / "rank0.jsonl").read_text().splitlines())
              if span["name"] == "forward"]  # fmt: skip
    between = sorted(later - earlier for earlier, later in pairwise(starts))
    return between[len(between) // 2]


@pytest.mark.parametrize("mode", ["vanilla", "overlap", "sparse", "sparse-overlap"])
def test_every_batch_is_done_once_whatever_the_order_of_messages(make: Make, tmp_path: Path, mode: str) -> None:
    reference = run(make, tmp_path / "reference", [1], stop__after="2e")
    for seed in range(3):
        folder = run(make, tmp_path / f"{mode}{seed}", [2, 1], shuffle_seed=seed, mode=mode, stop__after="2e")
        assert words(folder) == words(reference)


def test_a_model_can_be_charged_as_a_larger_one(make: Make, tmp_path: Path) -> None:
    from nmt_train.simulation.cluster import ScaleConfig

    device = DeviceConfig(forward=Cost("1s", "0s"))
    plain = run(make, tmp_path / "plain", [1, 1], device, mode="vanilla", stop__after="12u", trace=True,
                places=AT_ONCE)  # fmt: skip
    factor = 10
    elements = shard_bytes(plain, 4)
    scaled = run(make, tmp_path / "scaled", [1, 1], device, mode="vanilla", stop__after="12u", trace=True,
                 places={**AT_ONCE, "scale": ScaleConfig(str(factor * elements))})  # fmt: skip
    transfer = shard_bytes(plain, 2) / 100e3
    assert step_time(plain) == pytest.approx(1 + 2 * transfer, abs=1e-5)
    assert step_time(scaled) == pytest.approx(1 + 2 * factor * transfer, abs=1e-5)


@pytest.mark.parametrize("mode", [mode for mode in IN_STEP if mode in REPEATED and mode != "single"])
def test_where_workers_wait_for_each_other_charging_changes_nothing_but_time(make: Make, tmp_path: Path, mode: str) -> None:
    from nmt_train.simulation.cluster import ScaleConfig

    common = {"mode": mode, "stop__after": "12u", "batch__tokens": 300, "dropping__up": 0.9, "log__every": "3u"}
    plain = run(make, tmp_path / "plain", [2, 1], places=LINK, **common)
    scaled = run(make, tmp_path / "scaled", [2, 1], places={**LINK, "scale": ScaleConfig("1M")}, **common)
    assert parameters(scaled) == parameters(plain)
    assert seconds(scaled) > 2 * seconds(plain)


def test_a_machine_that_crashes_ends_training_with_its_name(make: Make, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rank 1 \(host node1\) has been silent for 60 s"):
        run(make, tmp_path / "run", [1, 1], mode="vanilla", stop__after="100000u",
            places={**LINK, "crashes": [Crash(1, "2s")]})  # fmt: skip


def test_if_every_machine_crashes_the_simulation_says_so(make: Make, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cluster: all ranks have failed"):
        run(make, tmp_path / "run", [1], stop__after="100000u", places={**LINK, "crashes": [Crash(0, "2s")]})


@pytest.mark.parametrize("batch", range(4, 11))
@pytest.mark.parametrize("changes", [{"local__every": 2, "local__delay": 2}, {"local__every": 3, "local__delay": 1}])
def test_a_step_that_is_not_finite_on_one_rank_leaves_no_rank_waiting_for_another(
    make: Make, tmp_path: Path, changes: dict[str, int], batch: int
) -> None:
    """At any place between giving a delta and taking the result, on either rank; all make as many exchanges."""
    with poisoned(range(batch, batch + 1), float("nan")):
        found = run(make, tmp_path / "run", [1, 1], mode="sparse-local", stop__after="12u", checkpoint__every="4u",
                    optimizer__not_finite="skip", **changes)  # fmt: skip
    assert (found / "train.log").read_text(encoding="utf-8").count("skipped: rank ") == 1


def test_a_pipeline_of_several_sums_that_are_not_finite_is_drained(make: Make, tmp_path: Path) -> None:
    with poisoned(range(11, 15), float("nan")):  # steps 6 and 7 of two workers; the fourth update comes with the seventh step
        found = run(make, tmp_path / "run", [1, 1], mode="pipe", pipeline__width=4, stop__after="12u", checkpoint__every="4u",
                    optimizer__not_finite="skip")  # fmt: skip
    assert (found / "train.log").read_text(encoding="utf-8").count("skipped: rank ") == 4
