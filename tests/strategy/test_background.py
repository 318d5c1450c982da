"""A task that exchanges vectors while its worker computes: an old one is waited for after a new one has begun."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch
from virtual import engine, together

from nmt_train.common.errors import NotFinite
from nmt_train.simulation.virtual_transport import VirtualTransport
from nmt_train.strategy.background import BackgroundTask, in_one_stage
from nmt_train.trace import Trace


@pytest.mark.parametrize(
    ("group", "order"),
    [
        (1, "a1 b1 c1 a2 b2 c2"),
        (2, "a1 a2 b1 b2 c1 c2 a3 a4 b3 b4 c3 c4"),
        (3, "a1 a2 b1 a3 b2 c1 b3 c2 c3"),
    ],
)
def test_in_every_round_one_vector_begins_and_all_pass_a_stage(group: int, order: str) -> None:
    passed, numbers = list[str](), range(1, order.count("a") + 1)

    def exchange(vector: torch.Tensor, number: int) -> Generator[None, None, int]:
        for stage in "abc":
            passed.append(f"{stage}{number}")
            if stage != "c":
                yield
        vector.mul_(2)
        return 10 * number

    def work(transport: VirtualTransport) -> list[tuple[float, int]]:
        task = BackgroundTask(transport, Trace(False, transport), exchange, group)
        for number in numbers:
            task.give(torch.tensor([float(number)]), number)
        assert task.under_way == len(numbers)
        return [(float(vector), result) for vector, result in (task.take() for _ in numbers)]

    assert together(engine([1]), work) == [[(2.0 * number, 10 * number) for number in numbers]]
    assert passed == order.split()


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
