"""Gradients in buckets: the same sums, while the backward pass is still on its way."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from conftest import Make
from contexts import context
from pulled import settings, strategy_of
from simulated import run
from torch import Tensor, nn
from torch.nn import functional
from virtual import engine, together

from nmt_train.common.errors import NotFinite
from nmt_train.corpus import BatchConfig
from nmt_train.modes.table import Replicas
from nmt_train.optim.config import OptimizerConfig
from nmt_train.optim.flat_model import FlatModel
from nmt_train.replicas.bucketed import Bucketed, _time_shares
from nmt_train.replicas.reducer import Reduction, StagedReducer
from nmt_train.replicas.reducers import REDUCERS
from nmt_train.run import checkpoint
from nmt_train.run.log import validations
from nmt_train.simulation.virtual_transport import VirtualTransport
from nmt_train.strategy.background import Stages
from nmt_train.strategy.config import ReplicasConfig
from nmt_train.strategy.context import BuildContext
from nmt_train.strategy.plan import ReplicasPlan
from nmt_train.strategy.state import WorkerState
from nmt_train.transport.local import LocalTransport

PATIENCE = 30.0  # seconds that a thread is waited for, which otherwise would be so for ever


class Recorder(StagedReducer):
    """Says which parts of a vector it was given, and when the first has come; may have a residual, which it adds."""

    def __init__(self, whole: Tensor, with_residual: bool) -> None:
        self.given, self.begun = list[tuple[int, int]](), threading.Event()
        self._left, self._with_residual = torch.zeros_like(whole), with_residual

    @classmethod
    def build(cls, context: BuildContext, settings: ReplicasPlan) -> Recorder:
        raise AssertionError("it is given")

    def stages(self, vector: Tensor, update: int, weight: int = 1, start: int = 0) -> Stages[Reduction]:
        yield from ()
        place = slice(start, start + vector.numel())
        vector += self._left[place]
        self._left[place] = 0
        self.given.append((place.start, place.stop))
        self.begun.set()
        return Reduction(1.0, weight)

    @property
    def residual(self) -> Tensor | None:
        return self._left if self._with_residual else None


class Layers(nn.Module):
    """Two layers; `between` is called when the backward pass has been through the second, but not through the first."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self._between = nn.Linear(4, 6), nn.Linear(6, 2), between

    def loss(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(self._between)
        return self.second(hidden).square().mean()


class Tied(nn.Module):
    """An embedding that is also the output layer, and one layer between; `between` is called before it is computed."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.layer, self._between = nn.Parameter(torch.randn(5, 4)), nn.Linear(4, 4), between
        self.looked_up: Tensor | None = None

    def separate_lookups(self, gradient: Tensor) -> None:
        self.looked_up = self.embedding.detach().requires_grad_()
        self.looked_up.grad = gradient

    def loss(self, ids: Tensor) -> Tensor:
        hidden = self.layer(functional.embedding(ids, self.embedding if self.looked_up is None else self.looked_up))
        if hidden.requires_grad:
            hidden.register_hook(self._between)
        return (hidden @ self.embedding.T).square().mean()


class Several(LocalTransport):
    """Says that there is another rank, which nobody asks for anything."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 2


def made(
    model: nn.Module, accumulate: int, buckets: int, late: bool = False, with_residual: bool = False
) -> tuple[Bucketed, FlatModel, Recorder]:
    flat = FlatModel(model)
    recorder = Recorder(flat.gradient, with_residual)
    made_of = context(
        Several() if late else LocalTransport(), flat, Replicas(), batch=BatchConfig(accumulate=accumulate),
        replicas=ReplicasConfig(buckets=buckets, late_lookups=late),
        optimizer=OptimizerConfig(name="sgd", learning_rate=0.5, schedule="constant", warmup=0, clip_norm=0),
    )  # fmt: skip
    assert isinstance(made_of.plan.family, ReplicasPlan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(REDUCERS["all-reduce"], "build", lambda context, settings: recorder)
        return Bucketed(made_of, made_of.plan.family), flat, recorder


def test_the_last_layers_bucket_is_summed_before_the_first_layer_is_computed() -> None:
    seen = []
    model = Layers(lambda _: seen.append(recorder.begun.wait(PATIENCE)))
    strategy, flat, recorder = made(model, 1, 4)  # 44 elements, the second layer's are the last 14
    strategy.backward(model.loss(torch.ones(5, 4)), 5)
    assert seen == [True]
    assert strategy.step()
    assert recorder.given == [(33, 44), (22, 33), (11, 22), (0, 11)]
    assert not flat.gradient.any()


def test_of_accumulated_steps_only_the_last_gives_anything_away() -> None:
    model = Layers(lambda _: None)
    strategy, flat, recorder = made(model, 3, 2)
    before = flat.parameters.clone()
    batches = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(2))
    for batch, last in zip(batches, (False, False, True), strict=True):
        assert not recorder.given
        strategy.backward(model.loss(batch), 5)
        assert strategy.step() == last
    assert recorder.given == [(22, 44), (0, 22)]
    plain = Layers(lambda _: None)
    torch.stack([plain.loss(batch) for batch in batches]).mean().backward()
    mean = torch.cat([parameter.grad.flatten() for parameter in plain.parameters() if parameter.grad is not None])
    torch.testing.assert_close(flat.parameters, before - 0.5 * mean)


@pytest.mark.parametrize("buckets", [1, 2, 7, 1000])
def test_what_was_owed_is_paid_in_full_and_once(buckets: int) -> None:
    model, owed = Layers(lambda _: None), torch.arange(44.0)
    strategy, flat, _ = made(model, 3, buckets)
    before = flat.parameters.clone()
    strategy.load(WorkerState(residual=owed))
    for _ in range(2):
        for _ in range(3):
            strategy.backward(0 * model.loss(torch.ones(5, 4)), 5)
            strategy.step()
    torch.testing.assert_close(flat.parameters, before - 0.5 * owed)


def test_a_drained_worker_has_given_away_what_had_piled_up() -> None:
    model = Layers(lambda _: None)
    strategy, _, recorder = made(model, 3, 2)
    strategy.backward(model.loss(torch.ones(5, 4)), 5)
    assert not strategy.step()
    assert strategy.mid_series
    strategy.drain()
    assert recorder.given == [(22, 44), (0, 22)]
    assert not strategy.mid_series
    assert strategy.updates == 1


def test_with_late_lookups_the_bucket_of_the_embedding_is_summed_first() -> None:
    seen = []
    model = Tied(lambda _: seen.append(recorder.begun.wait(PATIENCE)))
    strategy, _, recorder = made(model, 1, 4, late=True)  # 40 elements, the embedding's are the first 20
    strategy.backward(model.loss(torch.tensor([1, 2, 2])), 3)
    assert seen == [True]
    assert strategy.step()
    assert recorder.given == [(10, 20), (0, 10), (30, 40), (20, 30)]


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_late_lookups_are_added_to_the_next_exchange_and_nothing_else_is_late(accumulate: int, with_residual: bool) -> None:
    batches = torch.randint(5, (4, accumulate, 6), generator=torch.Generator().manual_seed(2))
    model = Tied(lambda _: None)
    strategy, flat, _ = made(model, accumulate, 4, late=True, with_residual=with_residual)
    lookups = torch.zeros(20)
    for steps in batches:
        before, expected = flat.parameters.clone(), torch.zeros(40)
        expected[:20] += lookups
        for step in steps:
            apart = FlatModel(Tied(lambda _: None))
            late = apart.separate_lookups()
            apart.parameters.copy_(before)
            apart.model.loss(step).backward()
            expected += apart.gradient / accumulate
            expected[:20] += late / accumulate
            lookups = late / accumulate
            strategy.backward(model.loss(step), 6)
            strategy.step()
        expected[:20] -= lookups  # those of the last step
        torch.testing.assert_close(flat.parameters, before - 0.5 * expected)


def test_without_a_batch_the_lookups_of_the_last_one_are_exchanged_only_once() -> None:
    model = Tied(lambda _: None)
    strategy, flat, _ = made(model, 1, 4, late=True, with_residual=True)
    strategy.backward(model.loss(torch.tensor([1, 2, 2])), 3)
    moved = []
    for _ in range(3):
        before = flat.parameters.clone()
        assert strategy.skip()
        moved.append(bool((flat.parameters != before).any()))
    assert moved == [True, True, False]


def test_without_a_batch_late_lookups_that_are_owed_wait_for_the_next_one() -> None:
    model = Tied(lambda _: None)
    strategy, _, _ = made(model, 1, 4, late=True)
    strategy.backward(model.loss(torch.tensor([1, 2, 2])), 3)
    assert strategy.step()
    owed = strategy.state().residual
    assert owed is not None
    assert owed[:20].any()
    assert not owed[20:].any()
    assert strategy.skip()
    assert torch.equal(strategy.state().residual, owed)  # type: ignore[arg-type]
    strategy.backward(0 * model.loss(torch.tensor([1, 2, 2])), 3)
    before = strategy.optimizer.parameters.clone()
    assert strategy.step()
    torch.testing.assert_close(before - strategy.optimizer.parameters, 0.5 * owed)


def test_lookups_whose_gradient_is_not_finite_make_all_workers_drop_the_next_exchange() -> None:
    model = Tied(lambda _: None)
    strategy, flat, _ = made(model, 1, 4, late=True)
    assert model.looked_up is not None
    lookups = model.looked_up.grad
    assert lookups is not None
    strategy.backward(model.loss(torch.tensor([1, 2, 2])), 3)
    lookups[1] = torch.inf
    assert strategy.step()
    assert strategy.skip()  # without a batch, this worker would be left out of the next exchange
    before = flat.parameters.clone()
    strategy.backward(model.loss(torch.tensor([1, 2, 2])), 3)
    with pytest.raises(NotFinite):
        strategy.step()
    assert torch.equal(flat.parameters, before)
    strategy.backward(model.loss(torch.tensor([1, 2, 2])), 3)
    assert strategy.step()
    assert flat.parameters.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "buckets", "accumulate"), [("sync", 2, 1), ("sync", 5, 1), ("sync", 64, 1), ("sync", 5, 2), ("powersgd", 8, 1)]
)
def test_two_workers_train_the_same_with_any_number_of_buckets(
    make: Make, tmp_path: Any, mode: str, buckets: int, accumulate: int
) -> None:
    """To the bit, but where gradients pile up: their parts are divided before, instead of their sum."""
    found = []
    for number in (1, buckets):
        folder = run(make, tmp_path / str(number), [1, 1], mode=mode, stop__after="5u", replicas__buckets=number,
                     optimizer__name="sgd", batch__accumulate=accumulate)  # fmt: skip
        found.append(checkpoint.load(folder / "last").tensors("parameters"))
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=0, atol=0 if accumulate == 1 else 1e-5)


def test_on_a_simulated_clock_a_bucket_sets_out_when_its_share_of_the_backward_pass_is_over() -> None:
    """Four buckets of 1,000 elements between two workers: a hop is 2,000 bytes, 2.25 s; a bucket takes two."""

    def work(transport: VirtualTransport, buckets: int) -> float:
        config = settings("sync", {"replicas.buckets": buckets})
        model = nn.Module()
        model.values = nn.Parameter(torch.ones(4000))
        flat = FlatModel(model)
        strategy = strategy_of(config, flat, transport)
        start = transport.now()
        strategy.backward(model.values.sum(), 1)
        strategy.step()
        return transport.now() - start

    whole, parts = (together(engine([1, 1]), *[lambda transport, n=n: work(transport, n)] * 2)[0] for n in (1, 4))
    update = 0.5
    assert whole == pytest.approx(2 + 2 * 8.25 + update)
    assert parts == pytest.approx(2 / 4 + 4 * 2 * 2.25 + update)  # the network is slower: it begins after a quarter


@pytest.mark.slow
def test_buckets_shorten_the_step_of_a_simulated_run(make: Make, tmp_path: Any) -> None:
    times = {}
    for buckets in (1, 8):
        folder = run(make, tmp_path / str(buckets), [1, 1], mode="sync", stop__after="6u", validation__every="6u",
                     replicas__buckets=buckets)  # fmt: skip
        times[buckets] = validations(folder)[-1]["seconds"]
    assert times[8] < times[1]


def test_on_a_simulated_clock_buckets_with_the_embedding_are_complete_when_the_backward_pass_ends() -> None:
    layout = [("embedding", (40, 10)), ("weight", (60, 10))]
    buckets = [slice(750, 1000), slice(500, 750), slice(250, 500), slice(0, 250)]
    assert _time_shares(layout, buckets) == pytest.approx([0.65, 0.25, 0.1, 0.0])  # first the output layer, which takes 0.4
    late = [slice(0, 250), slice(750, 1000), slice(500, 750), slice(250, 500)]
    assert _time_shares(layout, late, 400) == pytest.approx([0.4, 0.25, 0.25, 0.1])  # without lookups, one of them at once
    assert _time_shares([("bias", (1000,))], buckets) == pytest.approx([0.25] * 4)
