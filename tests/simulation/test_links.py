"""The connections of a job are measured; on simulated clusters, it is known what should be found."""

from __future__ import annotations

from pathlib import Path

import pytest
from virtual import engine, together

from nmt_train.simulation.adviser.links import Link, between
from nmt_train.simulation.adviser.measure import Measured, cluster_file
from nmt_train.simulation.cluster import Card, Cost, DeviceConfig, LinkConfig
from nmt_train.simulation.cluster_file import load

NETWORK, INSIDE = LinkConfig("10 MB/s", "2 ms"), LinkConfig("1 GB/s", "0.1 ms")


def found(nodes: list[int], ranks: list[int], **changes: object) -> Link:
    room = engine(nodes, **{"network": NETWORK, "inside": INSIDE, **changes})
    results = together(room, *[lambda transport: between(transport, ranks, 2.0)] * sum(nodes))
    assert results[1:] == [None] * (sum(nodes) - 1)
    return results[0]


@pytest.mark.parametrize("nodes", [[1, 1], [1, 1, 1, 1], [2, 2]])
def test_bandwidth_and_latency_between_machines_are_those_of_the_cluster_file(nodes: list[int]) -> None:
    link = found(nodes, [sum(nodes[:node]) for node in range(len(nodes))])
    assert link.latency == pytest.approx(0.002)
    assert link.one == pytest.approx(10e6, rel=0.02)
    assert link.bandwidth == pytest.approx(10e6, rel=0.02)
    assert len(link.all) == len(nodes)


def test_a_slow_card_is_not_blamed_on_its_neighbors() -> None:
    link = found([1] * 4, [0, 1, 2, 3], cards=[Card(1, 5e6)])
    assert link.all == pytest.approx([10e6, 5e6, 10e6, 10e6], rel=0.05)


@pytest.mark.slow
def test_devices_that_share_a_bus_are_slower_while_all_send() -> None:
    link = found([3], [0, 1, 2], bus="600 MB/s")
    assert link.one == pytest.approx(600e6, rel=0.05)
    assert link.bandwidth == pytest.approx(200e6, rel=0.05)


def device(seconds: float) -> DeviceConfig:
    return DeviceConfig(forward=Cost(0.0, seconds), backward=Cost(0.0, seconds))


def test_the_cluster_file_can_be_read_and_names_what_is_slower(tmp_path: Path) -> None:
    network = Link(0.001, 12.5e6, (12e6, 6e6, 12e6, 12.1e6))
    measured = Measured(
        (0, 1, 2, 3), ("a", "b", "c", "d"), tuple(map(device, (1e-3, 1e-3, 2e-3, 1e-3))), 500.0, 8 * 10**9, network, None
    )
    path = tmp_path / "cluster.yml"
    path.write_text(cluster_file(measured), encoding="utf-8")
    found = load(path)
    assert found.nodes == [1, 1, 1, 1]
    assert found.memory == 8e9
    assert (found.network.bandwidth, found.network.latency) == (pytest.approx(12e6), pytest.approx(0.001))
    assert [found.card(node) for node in range(4)] == pytest.approx([12e6, 6e6, 12e6, 12e6])
    assert [(its.rank, its.factor) for its in found.stragglers] == [(2, 2.0)]
    assert found.device == device(1e-3)


def test_slow_devices_are_named_machine_by_machine_however_ranks_were_dealt_to_machines(tmp_path: Path) -> None:
    network, inside = Link(0.001, 12e6, (12e6, 12e6)), Link(0.0001, 1e9, (1e9,) * 4)
    devices = tuple(map(device, (1e-3, 2e-3, 1e-3, 2e-3)))  # machine b is slow
    measured = Measured((0, 1, 0, 1), ("a", "b", "a", "b"), devices, 500.0, 8 * 10**9, network, inside)
    path = tmp_path / "cluster.yml"
    path.write_text(cluster_file(measured), encoding="utf-8")
    found = load(path)
    assert found.nodes == [2, 2]
    assert [its.rank for its in found.stragglers] == [2, 3]


@pytest.mark.parametrize(("rate", "said"), [(11e6, False), (6e6, True), (24e6, True)])
def test_a_network_that_changes_while_it_is_measured_is_said(rate: float, said: bool) -> None:
    before, later = (Link(0.001, speed, (speed, speed)) for speed in (12e6, rate))
    measured = Measured((0, 1), ("a", "b"), (device(1e-3), device(1e-3)), 500.0, 8 * 10**9, before, None, later)
    assert measured.warning.startswith("warning: the network had 12 MB/s at first, but") == said
    assert ("# warning: the network" in cluster_file(measured)) == said


def test_on_one_machine_only_the_connection_inside_is_used(tmp_path: Path) -> None:
    inside = Link(0.0001, 6e9, (5e9, 5e9))
    measured = Measured((0, 0), ("a", "a"), (device(1e-3), device(1e-3)), 500.0, 8 * 10**9, None, inside)
    path = tmp_path / "cluster.yml"
    path.write_text(cluster_file(measured), encoding="utf-8")
    assert "not used" in path.read_text(encoding="utf-8")
    assert load(path).nodes == [2]
    assert load(path).inside.bandwidth == 5e9
