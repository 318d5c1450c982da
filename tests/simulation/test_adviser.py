"""nmt-simulate --compare: which mode learns the same model soonest on a cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Make
from virtual import cluster

from nmt_train.modes import build as modes
from nmt_train.simulation.adviser.compare import Comparison, Row, choices, compare, configured
from nmt_train.simulation.adviser.words_needed import ONE, Choice, Needed, measured
from nmt_train.simulation.cluster import ClusterConfig, Cost, Crash, DeviceConfig, LinkConfig, ScaleConfig

DEVICE = DeviceConfig(forward=Cost(0.0, 1e-3), backward=Cost(0.0, 2e-3), update=Cost(0.0, 1e-10))
FOUR = Choice("sync", {"override.up": "bf16"}, 4, Needed(1.6, 1.3, 1.9))


def machines(bandwidth: str, nodes: list[int] | None = None) -> ClusterConfig:
    link = LinkConfig(bandwidth, "0.1ms")
    scale = ScaleConfig("60M")
    return cluster(nodes or [1, 1, 1], DEVICE, network=link, inside=link, scale=scale, crashes=[Crash(0, "1s")])


def compared(make: Make, described: ClusterConfig) -> Comparison:
    return compare(make(), described, [(60, 100)], [400, 500, 600], lambda done, total, what: None)


def test_one_worker_needs_what_one_worker_needs() -> None:
    assert FOUR.on(1) == ONE
    assert FOUR.on(4) == FOUR.needed
    assert Choice("vanilla", {}).on(4) is None


@pytest.mark.parametrize("workers", [2, 3, 8, 16])
def test_what_more_workers_need_grows_with_their_number_and_becomes_less_certain(workers: int) -> None:
    found = FOUR.on(workers)
    assert found is not None
    assert found.words == pytest.approx(1 + 0.6 * (workers - 1) / 3)
    assert found.low < found.words < found.high
    assert (found.high - found.low) / (found.words - 1) > (1.9 - 1.3) / 0.6


def test_everything_that_is_compared_is_a_valid_choice(make: Make) -> None:
    for choice in choices():
        nodes = (0,) if choice.mode == "single" else (0, 1, 2, 3)
        assert modes.check(configured(make(batch__accumulate=3, stop__after="3e"), choice), nodes).workers == len(nodes)
    assert {"sync", "powersgd", "sparse-local", "local-sgd"} <= {choice.mode for choice in measured()}


def test_a_fast_network_makes_all_machines_pay_and_a_slow_one_none(make: Make) -> None:
    quick, slow = (compared(make, machines(bandwidth)) for bandwidth in ("100 GB/s", "1 kB/s"))
    assert quick.best.machines == 3
    assert quick.advice().startswith("Use --mode sync")
    assert "on all 3 machines" in quick.advice()
    assert quick.advice().count("sync") == 1
    assert slow.best.machines == 1
    assert slow.advice() == "Use one machine (--mode single): more do not pay here."


def test_rows_are_sorted_by_how_soon_they_learn_the_same(make: Make) -> None:
    found = compared(make, machines("1 Gbit/s"))
    speedups = [row.speedup[0] for row in found.rows if row.speedup]
    assert speedups == sorted(speedups, reverse=True)
    unknown = [row.speedup is None for row in found.rows]
    assert unknown == sorted(unknown), "those whose words are not known come last"
    one = next(row for row in found.rows if row.machines == 1)
    assert one.speedup == (1.0, 1.0, 1.0)


def test_a_machine_of_several_devices_is_measured_by_its_best_mode(make: Make) -> None:
    found = compared(make, machines("10 GB/s", [2, 2]))
    assert max(row.speedup[0] for row in found.rows if row.machines == 1 and row.speedup) == pytest.approx(1.0)
    assert {row.workers for row in found.rows} == {2, 4}


def test_further_machines_must_be_worth_it() -> None:
    rows = [
        Row(FOUR, machines, machines, speed, 0.0, 5e9, ONE, 100.0)
        for machines, speed in ((8, 412.0), (4, 400.0), (2, 200.0), (1, 100.0))
    ]
    found = Comparison(rows, {"strom": "does not work"})
    assert found.best.machines == 4
    assert "on 4 machines; more do not pay: 4.00 (4.00 to 4.00) times one machine" in found.advice()
    assert "not compared: strom: does not work" in found.table()


def test_what_does_not_fit_in_memory_is_not_recommended() -> None:
    rows = [Row(FOUR, 4, 4, 400.0, 0.0, 20e9, ONE, 100.0), Row(FOUR, 4, 4, 300.0, 0.0, 10e9, ONE, 100.0)]
    assert Comparison(rows, {}).best is rows[0]
    assert Comparison(rows, {}, memory=16e9).best is rows[1]
    assert "(not enough memory)" in Comparison(rows, {}, memory=16e9).table()


def test_the_table_the_json_and_the_picture_say_the_same(make: Make, tmp_path: Path) -> None:
    found = compared(make, machines("1 Gbit/s", [1, 1]))
    found.write(tmp_path)
    values = json.loads((tmp_path / "compare.json").read_text(encoding="utf-8"))
    assert values["advice"] == found.advice()
    assert len(values["rows"]) == len(found.rows) == len(found.table().splitlines()) - 1 - len(found.refused)
    assert (tmp_path / "compare.png").stat().st_size > 5000
