"""Timing without gradients: the same code and the same times, on vectors that have sizes and no values."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
from conftest import ROOT, Make
from simulated import REPEATED
from virtual import cluster

from nmt_train.codec.config import DroppingConfig
from nmt_train.codec.topk import TopK
from nmt_train.model.transformer import Transformer
from nmt_train.optim.flat_model import FlatModel
from nmt_train.optim.muon import muon_cost
from nmt_train.simulation.cluster import CodecConfig, Cost, DeviceConfig, LinkConfig, ScaleConfig, Straggler
from nmt_train.simulation.timing import Timing, measure

GOLDEN = ROOT / "tests" / "golden"
DEVICE = DeviceConfig(
    forward=Cost(0.01, 1e-3), backward=Cost(0.02, 2e-3), update=Cost(0.001, 1e-6), encode=Cost(0.002, 1e-6),
    decode=Cost(0.001, 0.0), swap=Cost(0.001, 0.0),
)  # fmt: skip
LINKS = {"network": LinkConfig(100e3, 0.001), "inside": LinkConfig(1e6, 0.0001)}
CLUSTERS: dict[str, tuple[list[int], dict[str, Any], dict[str, Any]]] = {
    "vanilla-1+1": ([1, 1], {}, {"mode": "vanilla"}),
    "overlap-2+1": ([2, 1], {}, {"mode": "overlap", "overlap__bound": 2}),
    "sparse-overlap-1+1+1": ([1, 1, 1], {"stragglers": [Straggler(1, 2.0)]}, {"mode": "sparse-overlap"}),
}


def timed(make: Make, nodes: list[int], steps: int, places: dict[str, Any] | None = None, **changes: Any) -> Timing:
    return measure(
        make(trace=True, **changes), cluster(nodes, DEVICE, **LINKS, **(places or {})), [(6000,)], [10, 30, 20], steps
    )


@pytest.mark.parametrize("name", CLUSTERS)
def test_traces_of_small_clusters_are_the_golden_ones(make: Make, name: str) -> None:
    """After a change that is meant to move them: NMT_TRAIN_GOLDEN=write, and look at what git shows."""
    nodes, places, changes = CLUSTERS[name]
    lines = ["rank thread name start end (milliseconds)"]
    for rank, found in enumerate(timed(make, nodes, 4, places, **changes).ranks):
        for span, thread, start, end, _ in found.spans:
            lines.append(f"{rank} {thread.replace(' ', '-')} {span.replace(' ', '-')} {1e3 * start:.3f} {1e3 * end:.3f}")
    text = "\n".join(lines) + "\n"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("NMT_TRAIN_GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("codec", "changes", "others"),
    [
        ("low-bit", {"mode": "low-bit"}, {"mode": "sync", "replicas__codec": "half"}),
        ("powersgd", {"mode": "powersgd", "replicas__codec": "half"}, {"mode": "sparse-local"}),
        ("tile-top-k", {"mode": "sparse-local"}, {"mode": "sparse-local", "replicas__codec": "top-k"}),
        ("half", {"mode": "sync", "replicas__codec": "half"}, {"mode": "powersgd"}),
    ],
)
def test_a_worker_is_charged_for_the_codec_it_uses(
    make: Make, codec: str, changes: dict[str, Any], others: dict[str, Any]
) -> None:
    slow = CodecConfig(encode=Cost(0.0, 1e-5), decode=DEVICE.decode)
    device = dataclasses.replace(DEVICE, codecs={codec: slow})

    def seconds(device: DeviceConfig, changes: dict[str, Any]) -> float:
        return measure(make(**changes), cluster([1, 1], device, **LINKS), [(6000,)], [20], 4).seconds

    assert seconds(device, others) == seconds(DEVICE, others)
    assert seconds(device, changes) == seconds(dataclasses.replace(DEVICE, encode=slow.encode), changes)
    assert seconds(device, changes) > seconds(DEVICE, changes)


@pytest.mark.slow
def test_times_and_bytes_of_every_mode_are_the_golden_ones(make: Make) -> None:
    """A portable part of scripts/golden. NMT_TRAIN_GOLDEN=write makes the table again."""
    lines = ["mode seconds spans and bytes of each rank"]
    for mode in REPEATED:
        found = timed(make, [2] if mode == "single" else [2, 1], 8, mode=mode, local__every=3)
        ranks = " ".join(f"{len(rank.spans)}:{rank.sent:.0f}" for rank in found.ranks)
        lines.append(f"{mode} {found.seconds:.6f} {ranks}")
    text = "\n".join(lines) + "\n"
    path = GOLDEN / "modes.txt"
    if os.environ.get("NMT_TRAIN_GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_exchanging_is_shown_also_where_another_task_does_it(make: Make) -> None:
    for mode in ("vanilla", "sync"):
        for rank in timed(make, [1, 1], 8, mode=mode).ranks:
            assert 0.3 < rank.share("sync", "swap") < 1, mode


def test_what_low_rank_sends_depends_on_the_shapes(make: Make) -> None:
    config, room = make(mode="powersgd"), cluster([1, 1], DEVICE, **LINKS)
    flat, square = (measure(config, room, shapes, [10], 8).ranks[0].sent for shapes in ([(6400,)], [(80, 80)]))
    assert square == pytest.approx(flat * 2 * 80 / 6400)


def test_muon_takes_the_time_of_its_iterations_which_owners_share(make: Make) -> None:
    config = make(mode="single")
    flat = FlatModel(Transformer(config.model, 50))
    shapes, matrices = [shape for _, shape in flat.layout], flat.matrices()

    def updating(mode: str, ranks: int, optimizer: str) -> float:
        """Seconds of an update, on the mean of all ranks, in the threads of all."""
        changed = make(mode=mode, optimizer__name=optimizer, **({} if mode == "single" else {"replicas__buckets": 1}))
        device = dataclasses.replace(DEVICE, update=Cost(per_unit=1e-6))
        timing = measure(changed, cluster([1] * ranks, device, **LINKS), shapes, [10], 8)
        threads = [spent for rank in timing.ranks for spent in rank.spent.values()]
        return sum(spent.get("update", 0.0) for spent in threads) / ranks / 8

    more = muon_cost(0, matrices) * 1e-6
    assert updating("single", 1, "muon") - updating("single", 1, "adam") == pytest.approx(more)
    for mode in ("sync", "low-bit"):
        assert updating(mode, 2, "muon") - updating(mode, 2, "adam") == pytest.approx(more / 2)


@pytest.mark.parametrize("steps", [20, 24, 27])
def test_words_per_second_do_not_depend_on_how_many_exchanges_the_steps_contain(make: Make, steps: int) -> None:
    config = make(mode="local-sgd", local__every=8)
    few, many = (measure(config, cluster([1, 1], DEVICE, **LINKS), [(5000,)], [100], number) for number in (steps, 800))
    assert few.words_per_second == pytest.approx(many.words_per_second, rel=1e-3)


def test_initial_parameters_are_not_counted_as_sent(make: Make) -> None:
    few, many = (timed(make, [1, 1], steps, mode="vanilla").ranks[0].sent for steps in (8, 16))
    assert many == 2 * few


def test_what_would_be_sent_is_as_long_as_what_is_sent() -> None:
    import torch

    torch.manual_seed(1)
    for dropped in (0.9, 0.99, 0.999):
        for indices in ("gaps", "int32"):
            config = DroppingConfig(indices=indices)
            sent = TopK(config, dropped).encode(torch.randn(400_000), 0).bytes
            expected = TopK(config, dropped).encode_shape(torch.empty(400_000, device="meta")).bytes
            assert expected == pytest.approx(sent, rel=0.2)  # the threshold of a sample errs


def test_a_slower_device_takes_its_factor_longer(make: Make) -> None:
    found = timed(make, [1, 1], 20, {"stragglers": [Straggler(1, 2.0)]}, mode="overlap", overlap__bound=0)
    assert found.ranks[0].words_per_second == pytest.approx(2 * found.ranks[1].words_per_second, rel=0.1)


def test_carrying_messages_to_other_machines_is_taken_from_computing(make: Make) -> None:
    busy = dataclasses.replace(DEVICE, carry=Cost(0.0, 2e-6))  # a fifth of it at 100 kB/s
    idle, taken = (
        measure(make(mode="overlap"), cluster([1, 1], device, **LINKS), [(6000,)], [20], 20) for device in (DEVICE, busy)
    )
    assert taken.words_per_second < 0.9 * idle.words_per_second
    library = make(mode="pipe", replicas__codec="dense", replicas__algorithm="mpi")
    idle, taken = (measure(library, cluster([1, 1], device, **LINKS), [(6000,)], [400], 20) for device in (DEVICE, busy))
    assert taken.words_per_second < idle.words_per_second
    same = [measure(make(mode="overlap"), cluster([2], device, **LINKS), [(6000,)], [20], 20) for device in (DEVICE, busy)]
    assert same[0].words_per_second == same[1].words_per_second


def test_a_device_that_computes_notices_messages_of_other_machines_late(make: Make) -> None:
    def speed(nodes: list[int], response: float, **changes: Any) -> float:
        device = dataclasses.replace(DEVICE, response=response)
        return measure(make(**changes), cluster(nodes, device, **LINKS), [(6000,)], [20], 20).words_per_second

    bucketed = {"mode": "low-bit"}  # its messages arrive during the backward pass
    assert speed([1, 1], 0.02, **bucketed) < 0.95 * speed([1, 1], 0.0, **bucketed)
    assert speed([1, 1], 0.001, **bucketed) == speed([1, 1], 0.0, **bucketed)  # not longer than the latency
    assert speed([2], 0.02, **bucketed) == speed([2], 0.0, **bucketed)
    waits = {"mode": "local-sgd", "local__every": 1, "local__delay": 0}  # workers compute nothing while their sum is on its way
    assert speed([1, 1], 0.02, **waits) == pytest.approx(speed([1, 1], 0.0, **waits), rel=0.01)


def test_even_a_single_step_has_a_speed(make: Make) -> None:
    assert timed(make, [1], 1, mode="single").words_per_second > 0
    assert "0.0%" in measure(make(mode="single"), cluster([1], DeviceConfig()), [(6000,)], [20], 1).table()


def test_transfers_that_take_turns_move_about_as_much_as_those_that_share(make: Make) -> None:
    speeds = [timed(make, [1] * 4, 20, {"transfers": how}, mode="vanilla").words_per_second for how in ("share", "turns")]
    assert speeds[0] == pytest.approx(speeds[1], rel=0.25)


def test_devices_on_one_bus_are_slower_than_on_their_own_connections(make: Make) -> None:
    apart, together = (timed(make, [4], 20, places, mode="single").words_per_second for places in ({}, {"bus": 2e5}))
    assert together < 0.8 * apart


def test_inside_a_machine_the_thesis_pays_the_bus_for_dense_exchanges(make: Make) -> None:
    """Thesis 4.2.2: shards of the same machine are reached without dropping, and their messages use the bus."""
    slow, near, far = (
        timed(make, [2, 2], 20, {"bus": bus}, mode="thesis-sparse", server__bypass=bypass).words_per_second
        for bus, bypass in (("40 kB/s", "node"), ("1 GB/s", "node"), ("40 kB/s", "device"))
    )
    assert slow < 0.8 * near
    assert slow < 0.8 * far


def test_a_charge_of_a_hundredth_costs_as_much_as_a_hundredth_of_the_elements(make: Make) -> None:
    def speed(dropped: float, charged: float) -> float:
        places = {"scale": ScaleConfig(6000 * 100, charged)}
        more = {"mode": "thesis-sparse", "dropping__up": dropped, "dropping__down": dropped, "dropping__indices": "int32"}
        return timed(make, [1, 1], 20, places, **more).words_per_second

    assert speed(0.9, 0.01) == pytest.approx(speed(0.999, 1.0), rel=0.01)
    assert speed(0.9, 1.0) < 0.5 * speed(0.999, 1.0)


def test_jitter_is_the_same_for_the_same_seed_and_another_for_another(make: Make) -> None:
    one, same, other = (
        timed(make, [1, 1], 10, {"jitter": 0.2, "seed": seed}, mode="vanilla").words_per_second for seed in (1, 1, 2)
    )
    assert one == same != other
