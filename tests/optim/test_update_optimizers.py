"""How shards and replicas apply finished updates: outer optimizers against torch's and against the papers' formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nmt_train.optim.config import OptimizerConfig
from nmt_train.optim.update_optimizers import DelayedOuterOptimizer, OuterOptimizer

RATE, MOMENTUM, SIZE = 0.7, 0.8, 50


def updates(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(SIZE, generator=generator) for _ in range(count)]


def optimizer(arrivals: int) -> DelayedOuterOptimizer:
    return DelayedOuterOptimizer(OptimizerConfig(), torch.ones(SIZE), RATE, MOMENTUM, arrivals)


def test_of_one_worker_it_is_nesterovs_momentum() -> None:
    found, parameter = optimizer(1), torch.nn.Parameter(torch.ones(SIZE))
    torchs = torch.optim.SGD([parameter], lr=RATE, momentum=MOMENTUM, nesterov=True)
    for update in updates(6):
        found.apply(update.clone())
        parameter.grad = -update
        torchs.step()
        torch.testing.assert_close(found.parameters, parameter.detach())


@pytest.mark.parametrize("workers", [2, 3])
def test_momentum_waits_for_a_round_of_all_workers(workers: int) -> None:
    """Algorithm 3 of Liu et al. (2024) with c = 0; its g is minus an update here."""
    found, theta = optimizer(workers), torch.ones(SIZE)
    momentum = total = torch.zeros(SIZE)
    for number, update in enumerate(updates(4 * workers)):
        gradient = -update
        total = total + gradient
        if (number + 1) % workers == 0:
            momentum, total = MOMENTUM * momentum + total / workers, torch.zeros(SIZE)
            theta = theta - RATE * (MOMENTUM * momentum + gradient / workers)
        else:
            theta = theta - RATE * gradient / workers
        found.apply(update.clone())
        torch.testing.assert_close(found.parameters, theta)


def test_it_continues_exactly_from_its_state_even_within_a_round() -> None:
    whole, before = optimizer(3), optimizer(3)
    for update in updates(8):
        whole.apply(update.clone())
    for update in updates(8)[:4]:
        before.apply(update.clone())
    vectors, numbers = before.state()
    after = DelayedOuterOptimizer(OptimizerConfig(), before.parameters.clone(), RATE, MOMENTUM, 3)
    after.load({name: vector.clone() for name, vector in vectors.items()}, numbers, "test")
    for update in updates(8)[4:]:
        after.apply(update.clone())
    assert torch.equal(after.parameters, whole.parameters)


def test_without_momentum_the_outer_optimizer_makes_plain_steps_and_continues_from_its_state() -> None:
    found = OuterOptimizer(OptimizerConfig(), torch.ones(SIZE), RATE, 0.0)
    first, second = updates(2)
    found.apply(first.clone())
    vectors, numbers = found.state()
    after = OuterOptimizer(OptimizerConfig(), found.parameters.clone(), RATE, 0.0)
    after.load({"outer.momentum_buffer": torch.ones(SIZE), **vectors}, numbers, "test")  # saved when there was momentum
    after.apply(second.clone())
    torch.testing.assert_close(after.parameters, 1 + RATE * (first + second))


def test_it_starts_without_momentum_from_another_mode() -> None:
    found, numbers = optimizer(2), {"updates": 7, "decayed": 0.0, "torch": dict[str, Any]()}
    found.load({}, numbers, "test")
    assert found.updates == 7
    assert all(not vector.any() for vector in found.state()[0].values())
