"""What a worker owes from an earlier start is applied once, also if the exchange that includes it fails."""

from __future__ import annotations

import pytest
import torch
from pulled import START, Vector, settings, strategy_of
from torch import Tensor

from nmt_train.common.errors import NotFinite
from nmt_train.optim.flat_model import FlatModel
from nmt_train.replicas.reducer import Reduction
from nmt_train.strategy.state import WorkerState
from nmt_train.strategy.strategy import Strategy
from nmt_train.transport.local import LocalTransport

DEBT = torch.arange(5.0)


class Ended(Exception):
    """Another rank has ended."""


def owing(mode: str, kind: str, **options: int) -> Strategy:
    chosen = settings(mode, {"replicas.buckets": 1, **options} if mode == "sync" else {"local.every": 1, **options})
    made = strategy_of(chosen, FlatModel(Vector()), LocalTransport())
    made.load(WorkerState(**{kind: DEBT.clone()}))
    made.refresh()
    return made


def fail(made: Strategy, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Exchange a gradient of zeros, during which this error is raised."""

    def reduce(vector: Tensor, update: int, weight: int) -> Reduction:
        raise error

    made.accumulator.add(1)
    with monkeypatch.context() as patch:
        patch.setattr(made._reducer, "reduce", reduce)  # type: ignore[attr-defined]
        with pytest.raises(type(error)):
            made.step()


@pytest.mark.parametrize(("mode", "kind"), [("sync", "residual"), ("local-sgd", "unsent")])
def test_it_is_in_doubt_if_ranks_end_during_the_exchange(mode: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = owing(mode, kind)
    assert torch.equal(getattr(made.state(), kind), DEBT)
    fail(made, monkeypatch, Ended())
    kept, doubtful = made.rescue()
    assert getattr(kept, kind) is None
    torch.testing.assert_close(getattr(doubtful, kind), DEBT)


@pytest.mark.parametrize(("mode", "kind", "sign"), [("sync", "residual", -0.125), ("local-sgd", "unsent", 1.0)])
def test_it_is_applied_by_the_next_exchange_if_one_is_dropped(
    mode: str, kind: str, sign: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = owing(mode, kind)
    fail(made, monkeypatch, NotFinite("the sum"))
    assert torch.equal(getattr(made.state(), kind), DEBT)
    for _ in range(2):
        made.accumulator.add(1)
        made.step()
        torch.testing.assert_close(made.optimizer.parameters, START + sign * DEBT)
    assert getattr(made.state(), kind) is None
