"""Pipe-SGD's equations are what the simulator does where times are constant."""

from __future__ import annotations

import dataclasses

import pytest
from conftest import Make
from reproduce import pipe_sgd_equations as equations
from virtual import cluster

from nmt_train.simulation.cluster import Cost, DeviceConfig, LinkConfig
from nmt_train.simulation.timing import measure

ELEMENTS, TOKENS = 6000, 20
LINK = LinkConfig(100e3, 0.001)
QUICK = DeviceConfig(forward=Cost(0.01, 0.0), backward=Cost(0.02, 0.0), update=Cost(0.004, 0.0), decode=Cost(0.0, 1e-6))
ORDERS = 2 * LINK.latency  # not in the equations: a report to rank 0 after every exchange, and its next order
SLOW = dataclasses.replace(QUICK, forward=Cost(1.0, 0.0), backward=Cost(2.0, 0.0))


def step(make: Make, device: DeviceConfig, p: int, **changes: object) -> float:
    """Seconds of a step of p workers on p machines."""
    room = cluster([1] * p, device, network=LINK, inside=LINK)
    return p * TOKENS / measure(make(**changes), room, [(ELEMENTS,)], [TOKENS], 30).words_per_second


def exchange(p: int) -> float:
    return equations.ring(p, n=4 * ELEMENTS, alpha=LINK.latency, beta=1 / LINK.bandwidth, gamma=1e-6 / 4)


@pytest.mark.parametrize("p", [2, 3, 5])
def test_sync_takes_the_sum_of_its_parts(make: Make, p: int) -> None:
    expected = equations.total_sync(1, 0.004, 0.03, exchange(p)) + ORDERS
    assert step(make, QUICK, p, mode="sync", replicas__buckets=1) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("p", [2, 3, 5])
@pytest.mark.parametrize("device", [QUICK, SLOW], ids=["the network is the limit", "computing is"])
def test_a_pipeline_takes_the_longer_of_computing_and_exchanging(make: Make, p: int, device: DeviceConfig) -> None:
    free = dataclasses.replace(device, decode=Cost(0.0, 0.0))  # what adds up would take of the device that computes
    comm = equations.ring(p, n=4 * ELEMENTS, alpha=LINK.latency, beta=1 / LINK.bandwidth, gamma=0.0)
    comp = device.forward.seconds + device.backward.seconds + ORDERS
    for width in (2, 3):
        found = step(make, free, p, mode="pipe", replicas__codec="dense", pipeline__width=width)
        assert found == pytest.approx(equations.total_pipe(1, 0.004, comp, comm), rel=1e-6)


def test_equations_by_hand() -> None:
    assert equations.total_sync(10, 1, 2, 3) == 60
    assert equations.total_pipe_unlimited(10, 2, 1, 2, 3) == 30
    assert equations.total_pipe(10, 1, 2, 4) == 40
    assert equations.ring(4, n=8, alpha=1, beta=0.5, gamma=0.25, S=2) == 6 + 6 + 1.5 + 2
    assert equations.segmented_ring(4, n=8, L=3, alpha=1, beta=0.5, gamma=0.25, S=2) == 18 + 6 + 1.5 + 6
    assert equations.scaling_efficiency(1, 2, 4) == 0.75
