"""Muon where the owner is: each matrix is orthogonalized once, by one rank, and all ranks get the same direction."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from virtual import engine, together

from nmt_train.codec.dense import Dense
from nmt_train.codec.low_bit import LowBit
from nmt_train.common.message import Message
from nmt_train.model import ModelConfig
from nmt_train.model.transformer import Transformer
from nmt_train.optim.config import OptimizerConfig
from nmt_train.optim.flat_model import FlatModel
from nmt_train.optim.muon import Matrix
from nmt_train.optim.optimizer import Optimizer
from nmt_train.replicas.low_bit import LowBitReducer
from nmt_train.replicas.owned_matrices import OwnedMatrices
from nmt_train.replicas.ring import RingAllReduce
from nmt_train.simulation.virtual_transport import VirtualTransport
from nmt_train.strategy.config import LowBitConfig
from nmt_train.trace import Trace

CONFIG = OptimizerConfig(name="muon", schedule="constant", warmup=0)
STEPS = 4


class Exact(Dense):
    """Sends everything, whatever low-bit codecs are asked for."""

    def __init__(self, shapes: object, values: int, scratch: Tensor) -> None:
        super().__init__()

    def left_out(self, message: Message, vector: Tensor, into: Tensor) -> None:
        into.zero_()


class Rank:
    """A replica: a model, its optimizer, and the reducer that lets owners direct matrices."""

    def __init__(self, transport: VirtualTransport, kind: str = "low-bit") -> None:
        self.transport, self.flat = transport, model()
        self.optimizer = Optimizer(CONFIG, self.flat.parameters, self.flat.matrices())
        trace = Trace(False, transport)
        self.owned = OwnedMatrices(self.flat, self.optimizer, transport, trace)
        self.reducer: LowBitReducer | RingAllReduce
        if kind == "ring":
            self.reducer = RingAllReduce(transport, Dense(), trace)
        else:
            self.reducer = LowBitReducer(transport, self.flat.layout, LowBitConfig(), self.flat.gradient, trace)
            if kind.startswith("exact"):
                rounded = LowBit if kind == "exact up" else Exact
                self.reducer._kind = lambda shapes, values, scratch: (  # type: ignore[assignment, misc]
                    (Exact if values == LowBitConfig().up else rounded)(shapes, values, scratch)
                )
        self.reducer.own(self.owned)

    def step(self, gradient: Tensor, buckets: int = 3) -> Tensor:
        """Reduce a gradient, and apply it; returns what was applied: directions of matrices, and the mean of the rest."""
        self.reduce(gradient, buckets)
        self.owned.complete()
        applied = gradient.clone()
        self.optimizer.apply(gradient)
        return applied

    def reduce(self, gradient: Tensor, buckets: int = 3) -> None:
        for part in reversed(self.reducer.parts(gradient.numel(), buckets)):
            self.reducer.reduce(gradient[part], self.optimizer.updates, 1, part.start)


def model() -> FlatModel:
    torch.manual_seed(1)
    return FlatModel(
        Transformer(ModelConfig(preset="tiny", encoder_layers=1, decoder_layers=1, dim=8, ffn_dim=12, heads=2), 20)
    )


def gradients(ranks: int) -> Tensor:
    """(steps, ranks, elements)"""
    return torch.randn(STEPS, ranks, model().gradient.numel(), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kind", ["exact", "ring"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_if_nothing_is_rounded_ranks_move_like_one_with_the_mean_gradient(ranks: int, kind: str) -> None:
    given = gradients(ranks)

    def train(transport: VirtualTransport) -> Tensor:
        rank = Rank(transport, kind)
        for step in given:
            rank.step(step[transport.rank].clone())
        return rank.flat.parameters.clone()

    alone = model()
    optimizer = Optimizer(CONFIG, alone.parameters, alone.matrices())
    for step in given:
        optimizer.apply(step.mean(0))
    for moved in together(engine([1] * ranks), *[train] * ranks):
        torch.testing.assert_close(moved, alone.parameters, rtol=1e-4, atol=1e-6)


def test_replicas_stay_equal_although_directions_are_rounded() -> None:
    given, ranks = gradients(3), 3

    def train(transport: VirtualTransport) -> tuple[Tensor, dict[str, Tensor]]:
        rank = Rank(transport)
        for step in given:
            rank.step(step[transport.rank].clone())
        return rank.flat.parameters.clone(), rank.owned.state()

    found = together(engine([1] * ranks), *[train] * ranks)
    assert all(torch.equal(parameters, found[0][0]) for parameters, _ in found)
    left_out = set().union(*(state for _, state in found)) - {"ranks"}
    assert left_out == {f"left-out-of-matrix-{matrix.start}" for matrix in model().matrices()}


def test_what_is_left_out_of_a_direction_comes_later() -> None:
    """Of directions, all ranks have got everything but what the owners still keep."""
    given = gradients(2)

    def train(transport: VirtualTransport, kind: str) -> tuple[Tensor, dict[str, Tensor]]:
        rank = Rank(transport, kind)
        return sum(rank.step(step[transport.rank].clone()) for step in given), rank.owned.state()

    (rounded, first), (_, second) = together(engine([1, 1]), *[lambda transport: train(transport, "exact up")] * 2)
    right, _ = together(engine([1, 1]), *[lambda transport: train(transport, "exact")] * 2)[0]
    for matrix in model().matrices():
        left_out = (first | second)[f"left-out-of-matrix-{matrix.start}"].view(matrix.rows, matrix.columns)
        assert left_out.any()
        torch.testing.assert_close(matrix.of(rounded) + left_out, matrix.of(right), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["low-bit", "ring"])
@pytest.mark.parametrize(("ranks", "buckets"), [(2, 1), (3, 4), (5, 100)])
def test_every_matrix_has_one_owner_that_has_all_of_it(ranks: int, buckets: int, kind: str) -> None:
    given = gradients(ranks)[0]

    def owned(transport: VirtualTransport) -> set[Matrix]:
        rank = Rank(transport, kind)
        rank.step(given[transport.rank].clone(), buckets)
        return set(rank.owned.owned)

    found = together(engine([1] * ranks), *[owned] * ranks)
    assert set().union(*found) == set(model().matrices())
    assert not any(one & other for one, other in itertools.combinations(found, 2))


def test_rank_0_gets_all_momenta_before_a_snapshot() -> None:
    given = gradients(3)

    def train(transport: VirtualTransport) -> Tensor:
        rank = Rank(transport, "exact")
        for step in given:
            rank.step(step[transport.rank].clone())
        rank.owned.share_momenta()
        return rank.optimizer.state()[0]["exp_avg"].clone()

    alone = model()
    optimizer = Optimizer(CONFIG, alone.parameters, alone.matrices())
    for step in given:
        optimizer.apply(step.mean(0))
    shared = together(engine([1] * 3), *[train] * 3)[0]
    torch.testing.assert_close(shared, optimizer.state()[0]["exp_avg"])


def test_an_update_that_is_not_finite_changes_no_momentum() -> None:
    given = gradients(2)

    def train(transport: VirtualTransport, fails: bool) -> tuple[Tensor, dict[str, Tensor]]:
        rank = Rank(transport)
        rank.step(given[0, transport.rank].clone())
        if fails:
            broken = given[1, transport.rank].clone()
            broken[0] = torch.nan
            rank.reduce(broken)
            assert broken.isnan().any()
        rank.owned.share_momenta()
        return rank.optimizer.state()[0]["exp_avg"].clone(), rank.owned.state()

    (momenta, left_out), (expected, its) = (
        together(engine([1, 1]), *[lambda transport, fails=fails: train(transport, fails)] * 2)[0]  # type: ignore[misc]
        for fails in (True, False)
    )
    assert torch.equal(momenta, expected)
    assert left_out.keys() == its.keys()
    assert all(torch.equal(left_out[name], its[name]) for name in its)


def test_a_state_of_other_ranks_is_not_used() -> None:
    def load(transport: VirtualTransport) -> dict[str, Tensor]:
        rank = Rank(transport)
        rank.step(gradients(2)[0, transport.rank].clone())
        kept = rank.owned.state()
        rank.owned.load(kept)
        assert rank.owned.state().keys() == kept.keys()
        rank.owned.load(kept | {"ranks": torch.tensor([3])})
        return dict(rank.owned.state())

    assert together(engine([1, 1]), load, load) == [{}, {}]
