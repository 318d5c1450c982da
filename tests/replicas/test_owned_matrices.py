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

    def __init__(self, transport: VirtualTransport, codec: type[Dense] | type[LowBit] = LowBit) -> None:
        self.transport, self.flat = transport, model()
        self.optimizer = Optimizer(CONFIG, self.flat.parameters, self.flat.matrices())
        trace = Trace(False, transport)
        self.owned = OwnedMatrices(self.flat, self.optimizer, transport, trace)
        self.reducer = LowBitReducer(transport, self.flat.layout, LowBitConfig(), self.flat.gradient, trace)
        self.reducer._kind = codec  # type: ignore[assignment]
        self.reducer.own(self.owned)

    def step(self, gradient: Tensor, buckets: int = 3) -> Tensor:
        """Reduce a gradient, and apply it; returns what was applied: directions of matrices, and the mean of the rest."""
        for part in reversed(self.reducer.parts(gradient.numel(), buckets)):
            self.reducer.reduce(gradient[part], self.optimizer.updates, 1, part.start)
        applied = gradient.clone()
        self.optimizer.apply(gradient)
        return applied


def model() -> FlatModel:
    torch.manual_seed(1)
    return FlatModel(
        Transformer(ModelConfig(preset="tiny", encoder_layers=1, decoder_layers=1, dim=8, ffn_dim=12, heads=2), 20)
    )


def gradients(ranks: int) -> Tensor:
    """(steps, ranks, elements)"""
    return torch.randn(STEPS, ranks, model().gradient.numel(), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("ranks", [2, 3])
def test_if_nothing_is_rounded_ranks_move_like_one_with_the_mean_gradient(ranks: int) -> None:
    given = gradients(ranks)

    def train(transport: VirtualTransport) -> Tensor:
        rank = Rank(transport, Exact)
        for step in given:
            rank.step(step[transport.rank].clone())
        return rank.flat.parameters.clone()

    alone = model()
    optimizer = Optimizer(CONFIG, alone.parameters, alone.matrices())
    for step in given:
        optimizer.apply(step.mean(0))
    for moved in together(engine([1] * ranks), *[train] * ranks):
        torch.testing.assert_close(moved, alone.parameters, rtol=1e-4, atol=1e-6)


def test_replicas_stay_equal_and_what_is_left_out_of_a_direction_comes_later() -> None:
    given, ranks = gradients(3), 3

    def train(transport: VirtualTransport, codec: type[Dense] | type[LowBit]) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        rank = Rank(transport, codec)
        applied = [rank.step(step[transport.rank].clone() if codec is LowBit else step[0].clone()) for step in given]
        return rank.flat.parameters.clone(), applied, rank.reducer.state()

    found = together(engine([1] * ranks), *[lambda transport: train(transport, LowBit)] * ranks)
    assert all(torch.equal(parameters, found[0][0]) for parameters, _, _ in found)
    left_out = {name: values for _, _, state in found for name, values in state.items()}
    for matrix in model().matrices():
        assert f"left-out-of-matrix-{matrix.start}" in left_out


def test_errors_of_directions_do_not_add_up() -> None:
    """With the same gradient in every step, the mean of the directions becomes what it is without rounding."""
    gradient = gradients(2)[0]

    def train(transport: VirtualTransport, codec: type[Dense] | type[LowBit]) -> Tensor:
        rank = Rank(transport, codec)
        return torch.stack([rank.step(gradient[0].clone()) for _ in range(40)]).mean(0)

    means = [
        together(engine([1, 1]), *[lambda transport, codec=codec: train(transport, codec)] * 2)[0]  # type: ignore[misc]
        for codec in (LowBit, Exact)
    ]
    for matrix in model().matrices():
        rounded, right = (matrix.of(mean) for mean in means)
        assert float((rounded - right).norm() / right.norm()) < 0.1


@pytest.mark.parametrize(("ranks", "buckets"), [(2, 1), (3, 4), (5, 100)])
def test_every_matrix_has_one_owner_that_has_all_of_it(ranks: int, buckets: int) -> None:
    given = gradients(ranks)[0]

    def owned(transport: VirtualTransport) -> set[Matrix]:
        rank = Rank(transport)
        rank.step(given[transport.rank].clone(), buckets)
        return rank.owned._owned

    found = together(engine([1] * ranks), *[owned] * ranks)
    assert set().union(*found) == set(model().matrices())
    assert not any(one & other for one, other in itertools.combinations(found, 2))


def test_rank_0_gets_all_momenta_before_a_snapshot() -> None:
    given = gradients(3)

    def train(transport: VirtualTransport) -> Tensor:
        rank = Rank(transport, Exact)
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
            for part in reversed(rank.reducer.parts(broken.numel(), 3)):
                rank.reducer.reduce(broken[part], 1, 1, part.start)
            assert broken.isnan().any()
        rank.owned.share_momenta()
        return rank.optimizer.state()[0]["exp_avg"].clone(), rank.reducer.state()

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
        kept = rank.reducer.state()
        rank.reducer.load(kept)
        assert rank.reducer.state().keys() == kept.keys()
        rank.reducer.load(kept | {"ranks": torch.tensor([3])})
        return dict(rank.reducer.state())

    assert together(engine([1, 1]), load, load) == [{}, {}]
