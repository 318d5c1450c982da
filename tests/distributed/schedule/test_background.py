"""A task that exchanges vectors while its worker computes: what may be sent is sent before anything is waited for."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch
from virtual import engine, together

from nmt_train.common.errors import NotFinite
from nmt_train.distributed.schedule.background import BackgroundTask, in_one_stage
from nmt_train.simulation.virtual_transport import VirtualTransport
from nmt_train.trace import Trace


def test_the_earliest_stages_come_first_and_results_in_the_order_of_the_vectors() -> None:
    passed = []

    def exchange(vector: torch.Tensor, number: int) -> Generator[None, None, int]:
        for stage in "abc":
            passed.append(f"{stage}{number}")
            if stage != "c":
                yield
        vector.mul_(2)
        return 10 * number

    def work(transport: VirtualTransport) -> list[tuple[float, int]]:
        task = BackgroundTask(transport, Trace(False, transport), exchange)
        for number in (1, 2, 3):
            task.give(torch.tensor([float(number)]), number)
        assert task.under_way == 3
        return [(float(vector), result) for vector, result in (task.take() for _ in range(3))]

    assert together(engine([1]), work) == [[(2.0, 10), (4.0, 20), (6.0, 30)]]
    assert passed == ["a1", "a2", "a3", "b1", "b2", "b3", "c1", "c2", "c3"]


def test_after_a_sum_that_is_not_finite_the_task_goes_on() -> None:
    def exchange(vector: torch.Tensor, number: int) -> int:
        if number == 1:
            raise NotFinite("infinite")
        return number

    def work(transport: VirtualTransport) -> None:
        task = BackgroundTask(transport, Trace(False, transport), in_one_stage(exchange))
        for number in (1, 2):
            task.give(torch.ones(1), number)
        with pytest.raises(NotFinite, match="infinite"):
            task.take()
        assert task.take()[1] == 2

    together(engine([1]), work)
