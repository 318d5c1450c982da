"""What a worker owes from an earlier start is applied once, also if the exchange that includes it fails."""

from __future__ import annotations

import pytest
import torch
from pulled import START, Vector, settings, strategy_of, target
from torch import Tensor
from virtual import engine, everybody_is_here, together

from nmt_train.common.errors import NotFinite
from nmt_train.optim.flat_model import FlatModel
from nmt_train.replicas.reducer import Reduction
from nmt_train.simulation.virtual_transport import VirtualTransport
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


@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_pipeline_applies_it_once(width: int) -> None:
    made = strategy_of(settings("pipe", {"pipeline.width": width}), FlatModel(Vector()), LocalTransport())
    made.load(WorkerState(residual=DEBT.clone()))
    made.refresh()
    for _ in range(5):
        made.accumulator.add(1)
        made.step()
    made.drain()
    torch.testing.assert_close(made.optimizer.parameters, START - 0.125 * DEBT)


@pytest.mark.parametrize(
    ("before", "after"), [("sparse-local", "sparse"), ("sparse", "sparse-local"), ("sparse-local", "sync")]
)
def test_after_a_change_of_the_mode_a_worker_begins_at_most_its_own_residual_away_from_the_others(
    before: str, after: str
) -> None:
    room = [engine([1, 1]) for _ in range(2)]
    options = {"dropping.up": 0.6, "local.every": 1, "local.delay": 0}

    def train(transport: VirtualTransport) -> tuple[Tensor, WorkerState]:
        made = strategy_of(settings(before, options), flat := FlatModel(Vector()), transport)
        made.refresh()
        everybody_is_here(transport)
        for _ in range(3):
            flat.gradient.add_(flat.parameters - target(transport.rank), alpha=made.accumulator.add(1))
            made.step()
        made.drain()
        everybody_is_here(transport)
        made.prepare_snapshot()
        return made.optimizer.parameters.clone(), made.state().each(torch.clone)

    saved = together(room[0], train, train)
    shared = torch.cat([parameters for parameters, _ in saved]) if before == "sparse" else saved[0][0]

    def resume(transport: VirtualTransport) -> tuple[Tensor, Tensor]:
        made = strategy_of(settings(after, options), flat := FlatModel(Vector()), transport)
        state = saved[transport.rank][1]
        made.optimizer.parameters.copy_(shared[made.slices[transport.rank]])
        made.load(state)
        made.resume()
        everybody_is_here(transport)
        owed = torch.zeros(5) if state.unsent is None else state.unsent
        return flat.parameters - shared, owed

    for away, owed in together(room[1], resume, resume):
        assert float(away.norm()) <= float(owed.norm()) + 1e-5
