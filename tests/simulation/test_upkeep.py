"""The time that checkpoints and recovery copies take is part of what the adviser compares."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from conftest import Make
from simulated import FAST, run
from virtual import cluster

from nmt_train.common.message import Message
from nmt_train.run import checkpoint
from nmt_train.simulation.cluster import Cost, DeviceConfig, LinkConfig
from nmt_train.simulation.timing import Timing, measure
from nmt_train.simulation.virtual_transport import VirtualTransport
from nmt_train.transport import Tag, of_model

ELEMENTS = 1_000_000
DEVICE = DeviceConfig(forward=Cost("10ms", "0s"), backward=Cost("20ms", "0s"))
LINKS = {"network": LinkConfig("1 MB/s", "0s"), "inside": LinkConfig("100 MB/s", "0s")}


def timed(make: Make, nodes: list[int], places: dict[str, Any] | None = None, **changes: Any) -> Timing:
    changes = {"checkpoint__every": "10m", "recovery__every": "10h", **changes}
    return measure(make(**changes), cluster(nodes, DEVICE, **{**LINKS, **(places or {})}), [(ELEMENTS,)], [10, 30], 6)


def test_replicas_send_nothing_for_a_checkpoint_because_rank_0_has_it_all(make: Make) -> None:
    assert timed(make, [1, 1], mode="sync").upkeep == 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["vanilla", "overlap", "sparse-overlap", "low-bit", "strom", "easgd", "sparse-local"])
def test_as_much_is_charged_as_a_simulated_run_sends_for_a_checkpoint(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    sent: list[int] = []
    send = VirtualTransport.send

    def recorded(its: VirtualTransport, to: int, tag: Tag, message: Message) -> Any:
        if tag == Tag.STATE and its.rank == 1:
            sent.append(of_model(tag, message))
        return send(its, to, tag, message)

    monkeypatch.setattr(VirtualTransport, "send", recorded)
    folder = run(make, tmp_path / "run", [1, 1], mode=mode, stop__after="6u", places=FAST)
    shapes = [tuple(tensor.shape) for tensor in checkpoint.load(folder / "last").tensors("parameters").values()]
    config = make(mode=mode, checkpoint__every="10m", recovery__every="99h", local__every=3)
    upkeep = measure(config, cluster([1, 1], DEVICE, **LINKS), shapes, [10, 30], 8).upkeep
    assert 600 * upkeep / (1 - upkeep) * 1e6 == pytest.approx(sum(sent), rel=0.01, abs=200)


def test_the_network_inside_a_machine_carries_what_its_own_ranks_send(make: Make) -> None:
    outside, inside = timed(make, [1, 1], mode="vanilla").upkeep, timed(make, [2], mode="vanilla").upkeep
    assert inside == pytest.approx(outside / 100, rel=0.05)


@pytest.mark.parametrize("every", ["1s", "10s"])
def test_an_interval_in_seconds_that_is_too_short_costs_a_twentieth_of_the_time(make: Make, every: str) -> None:
    assert timed(make, [1, 1], mode="vanilla", checkpoint__every=every).upkeep == pytest.approx(1 / 21, rel=0.01)


def test_copies_of_shards_are_charged_as_well(make: Make) -> None:
    one, two = (timed(make, [1, 1], mode="vanilla", checkpoint__every="99h", recovery__every=span) for span in ("1s", "99h"))
    assert one.upkeep - two.upkeep == pytest.approx(1 / 21, rel=0.01)


def test_an_interval_in_updates_is_kept_whatever_it_costs(make: Make) -> None:
    assert timed(make, [1, 1], mode="vanilla", checkpoint__every="10u").upkeep > 0.2


def test_a_cluster_with_free_snapshots_has_no_upkeep(make: Make) -> None:
    assert timed(make, [1, 1], {"snapshots": "free"}, mode="vanilla").upkeep == 0


def test_the_table_says_what_is_not_included(make: Make) -> None:
    timing = timed(make, [1, 1], mode="vanilla")
    assert "checkpoints and recovery copies: at most 1.7% of the time, not included" in timing.table()
    assert "recovery" not in dataclasses.replace(timing, upkeep=0.0).table()
