"""One large batch gives the same update as its parts, wherever these are joined and however unequal they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pulled import START, Vector, settings, strategy_of
from torch import Tensor
from virtual import engine, everybody_is_here, together

from nmt_train.modes import resolve as modes
from nmt_train.optim.flat_model import FlatModel
from nmt_train.optim.gradient_accumulation import GradientAccumulator
from nmt_train.optim.optimizer import Clipping
from nmt_train.simulation.virtual_transport import VirtualTransport

Share = list[int | None]  # target tokens of each of a rank's batches; None: there is none


class Regression(Vector):
    """The mean squared error of a linear model, per token."""

    def loss(self, x: Tensor) -> Tensor:
        return (x @ self.values - x.sum(1)).square().mean()


def batches(shares: list[Share]) -> list[list[Tensor | None]]:
    torch.manual_seed(4)
    return [[None if tokens is None else torch.randn(tokens, 5) for tokens in share] for share in shares]


def trained(mode: str, nodes: list[int], shares: list[Share], options: dict[str, Any]) -> list[Tensor]:
    """Of every rank the parameters after each has had its share, and all that is under way has arrived."""
    chosen, room = settings(mode, options), engine(nodes)

    def work(transport: VirtualTransport) -> Tensor:
        model = Regression()
        flat = FlatModel(model)
        strategy = strategy_of(chosen, flat, transport)
        strategy.refresh()
        for batch in batches(shares)[transport.rank]:
            if batch is not None:
                strategy.backward(model.loss(batch), len(batch))
                strategy.step()
            elif modes.resolve(chosen).synchronous:
                strategy.skip()
        strategy.drain()
        everybody_is_here(transport)
        strategy.refresh()
        return flat.parameters

    return together(room, *[work] * len(room.transports))


def at_once(shares: list[Share], sums: bool = False, clip_norm: float = 0.0, rate: float = 0.125) -> Tensor:
    """One update by the gradient of all batches: of their concatenation, or the sum of their own."""
    model = Regression()
    parts = [batch for share in batches(shares) for batch in share if batch is not None]
    loss = sum((model.loss(part) for part in parts), torch.zeros(())) if sums else model.loss(torch.cat(parts))
    loss.backward()
    gradient = model.values.grad
    assert gradient is not None
    limit = clip_norm * (len(parts) if sums else 1)
    return START - rate * gradient * (limit / max(limit, float(gradient.norm())) if limit else 1.0)


UNEQUAL: list[Share] = [[3], [17], [6]]
PRODUCTS: dict[str, tuple[str, list[int], list[Share], dict[str, Any], float]] = {
    "accumulated": ("single", [1], [[3, 17, 6]], {"batch.accumulate": 3}, 1e-6),
    "accumulated and drained early": ("single", [1], [[3, 17, 6]], {"batch.accumulate": 5}, 1e-6),
    "all-reduce": ("sync", [1, 2], UNEQUAL, {}, 1e-6),
    "all-reduce in one piece": ("sync", [1, 2], UNEQUAL, {"replicas.buckets": 1}, 1e-6),
    "all-reduce by the library": ("sync", [1, 2], UNEQUAL, {"replicas.algorithm": "mpi"}, 1e-6),
    "all-reduce in half precision": ("sync", [1, 2], UNEQUAL, {"replicas.codec": "half"}, 2e-3),
    "all-reduce in 8 bits": ("sync", [1, 2], UNEQUAL, {"replicas.codec": "int8"}, 2e-2),
    "all-reduce and accumulated": ("sync", [1, 1], [[3, 17], [6, 1]], {"batch.accumulate": 2}, 1e-6),
    "all-reduce, a rank without a batch": ("sync", [1, 1, 1], [[3], [None], [6]], {}, 1e-6),
    "all-reduce, a rank with fewer": ("sync", [1, 1], [[3, 17], [6, None]], {"batch.accumulate": 2}, 1e-6),
    "powersgd": ("powersgd", [1, 2], UNEQUAL, {}, 1e-6),
    "powersgd, a rank without a batch": ("powersgd", [1, 1, 1], [[3], [None], [6]], {}, 1e-6),
    "pipeline": ("pipe", [1, 2], UNEQUAL, {"replicas.codec": "dense"}, 1e-6),
    "pipeline, a rank without a batch": ("pipe", [1, 1, 1], [[3], [None], [6]], {"replicas.codec": "dense"}, 1e-6),
    "rounds": ("backup", [1, 2], UNEQUAL, {"server.backup": 0}, 1e-6),
    "rounds, a rank without a batch": ("backup", [1, 1, 1], [[3], [None], [6]], {"server.backup": 0}, 1e-6),
    "rounds of nodes": ("backup", [2, 1], UNEQUAL, {"server.backup": 0, "server.per": "node"}, 1e-6),
    "softsync": ("softsync", [1, 2], UNEQUAL, {"server.bundle": 3}, 1e-6),
    "bundles": ("vanilla", [1, 2], UNEQUAL, {"server.bundle": 3}, 1e-6),
    "a node's devices": ("vanilla", [3], UNEQUAL, {"server.per": "node"}, 1e-6),
    "pushes of several steps": ("downpour", [1], [[3, 17, 6]], {"batch.accumulate": 3, "server.pull_every": 3}, 1e-6),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_one_large_batch_is_its_parts(name: str) -> None:
    mode, nodes, shares, options, tolerance = PRODUCTS[name]
    found = trained(mode, nodes, shares, {"optimizer.name": "sgd"} | options)
    for parameters in found:
        torch.testing.assert_close(parameters, at_once(shares), rtol=0, atol=tolerance * 8)


# Rounds and softsync are means by definition.
@pytest.mark.parametrize("name", [name for name in PRODUCTS if PRODUCTS[name][0] not in ("softsync", "backup")])
def test_or_the_sum_of_their_means_where_sums_are_wanted(name: str) -> None:
    mode, nodes, shares, options, tolerance = PRODUCTS[name]
    found = trained(mode, nodes, shares, {"optimizer.name": "sgd", "batch.reduction": "sum"} | options)
    for parameters in found:
        torch.testing.assert_close(parameters, at_once(shares, sums=True), rtol=0, atol=tolerance * 40)


def test_a_mean_of_sums_counts_every_push_once_however_many_batches_it_has() -> None:
    options = {"optimizer.name": "sgd", "batch.reduction": "sum", "server.backup": 0, "server.per": "node"}
    for parameters in trained("backup", [2, 1], UNEQUAL, options):  # two pushes, of two batches and of one
        torch.testing.assert_close(parameters, at_once(UNEQUAL, sums=True, rate=0.125 / 2), rtol=0, atol=1e-5)


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("name", ["accumulated", "all-reduce", "pipeline", "pushes of several steps"])
def test_a_joined_gradient_is_clipped_as_one_and_a_sum_as_its_mean(name: str, sums: bool) -> None:
    mode, nodes, shares, options, _ = PRODUCTS[name]
    options = {"optimizer.name": "sgd", "optimizer.clip_norm": 0.5, "batch.reduction": "sum" if sums else "mean"} | options
    for parameters in trained(mode, nodes, shares, options):
        torch.testing.assert_close(parameters, at_once(shares, sums, clip_norm=0.5), rtol=0, atol=1e-5)


def test_a_batch_that_is_alone_is_left_as_it_is() -> None:
    accumulator = GradientAccumulator(sums=False)
    assert accumulator.add(2048) == 1.0
    gradient = torch.randn(5)
    before = gradient.clone()
    assert accumulator.join(gradient, Clipping(0.0)) == (pytest.approx(float(before.norm())), 2048)
    assert torch.equal(gradient, before)


@pytest.mark.parametrize("share", [None, 4])
def test_an_average_of_workers_leaves_out_those_that_had_no_batch(share: int | None) -> None:
    shares: list[Share] = [[5], [share]]
    found = trained("local-sgd", [1, 1], shares, {"local.every": 1})
    ways = at_once([[5]]) - START
    if share is not None:
        model = Regression()
        model.loss(batches(shares)[1][0]).backward()  # type: ignore[arg-type]
        ways = (ways - 0.125 * model.values.grad) / 2  # type: ignore[operator]
    for parameters in found:
        torch.testing.assert_close(parameters, START + ways, rtol=0, atol=1e-6)


def test_a_bundle_of_stale_pushes_counts_each_by_its_own_share() -> None:
    """Three workers push to a shard that updates by two at a time; the last push of the third bundle is two updates old."""
    from nmt_train.codec.dense import Dense
    from nmt_train.common.message import Message
    from nmt_train.optim.config import OptimizerConfig
    from nmt_train.optim.optimizer import Optimizer
    from nmt_train.server.shard import Shard
    from nmt_train.strategy.update_rules import StalenessAware

    plain = OptimizerConfig(name="sgd", learning_rate=1.0, schedule="constant", warmup=0)
    made = Shard(Optimizer(plain, torch.zeros(1)), Dense(), None, StalenessAware(2))
    for worker in range(4):
        made.pull(worker)
    steps = [(0, 1.0), (1, 1.0), (2, 1.0), (2, 1.0), (2, 8.0), (3, 8.0)]
    for worker, gradient in steps:
        made.push(worker, Message((), (torch.tensor([-gradient]),)))
        made.answer(worker)
    assert dict(made.staleness) == {0: 4, 1: 1, 2: 1}
    assert float(made.optimizer.parameters) == pytest.approx((1 + 1) / 2 + (1 + 1) / 2 + (8 + 8 / 2) / 2)
