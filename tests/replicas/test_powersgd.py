"""Sums as products of thin matrices: the same everywhere, short, and what they miss comes later."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from virtual import engine, together

from nmt_train.codec.dense import Dense
from nmt_train.replicas.butterfly import ButterflyAllReduce
from nmt_train.replicas.powersgd import LowRankReducer
from nmt_train.replicas.reducer import EncodingReducer
from nmt_train.replicas.ring import RingAllReduce
from nmt_train.simulation.virtual_transport import VirtualTransport
from nmt_train.strategy.background import BackgroundTask
from nmt_train.strategy.config import LowRankConfig
from nmt_train.trace import Trace
from nmt_train.transport import Tag
from nmt_train.transport.local import LocalTransport

LAYOUT = [("weight", (12, 9)), ("bias", (7,)), ("other", (4, 3, 5)), ("small", (2, 2))]
ELEMENTS = 12 * 9 + 7 + 60 + 4


def summed(
    vectors: Tensor, rank: int, dense_updates: int = 0, algorithm: type[EncodingReducer] = RingAllReduce, parts: int = 1
) -> list[tuple[list[Tensor], Tensor, int]]:
    """Of every rank, for `vectors` (steps, ranks, elements): the means, what is left to be sent, bytes sent."""

    def reduce(transport: VirtualTransport) -> tuple[list[Tensor], Tensor, int]:
        trace = Trace(False, transport)
        inner, config = algorithm(transport, Dense(), trace), LowRankConfig(rank, dense_updates)
        made = LowRankReducer(inner, LAYOUT, config, torch.zeros(ELEMENTS), trace, transport)
        found = []
        for update, step in enumerate(vectors):
            own = step[transport.rank].clone()
            for part in reversed(made.parts(ELEMENTS, parts)):
                own[part] /= made.reduce(own[part], update, 1, part.start).divisor
            found.append(own)
        return found, made.residual.clone(), transport.sent[Tag.REDUCE][1]

    ranks = vectors.shape[1]
    return together(engine([1] * ranks), *[reduce] * ranks)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("algorithm", [RingAllReduce, ButterflyAllReduce])
@pytest.mark.parametrize("rank", [1, 2])
def test_all_have_the_same_and_nothing_is_lost(rank: int, algorithm: type[EncodingReducer], parts: int) -> None:
    torch.manual_seed(1)
    vectors = torch.randn(5, 3, ELEMENTS)
    found = summed(vectors, rank, algorithm=algorithm, parts=parts)
    for sums, _, _ in found:
        assert all(torch.equal(one, other) for one, other in zip(sums, found[0][0], strict=True))
    owed = sum((left for _, left, _ in found), torch.zeros(ELEMENTS))
    torch.testing.assert_close(3 * sum(found[0][0]) + owed, vectors.sum((0, 1)), rtol=0, atol=1e-4)


def test_the_first_updates_may_be_dense() -> None:
    torch.manual_seed(5)
    vectors = torch.randn(3, 2, ELEMENTS)
    sums, owed, _ = summed(vectors, 1, dense_updates=2)[0]
    torch.testing.assert_close(sums[:2], [vectors[0].mean(0), vectors[1].mean(0)])
    assert owed.any(), "the third is compressed"


def test_what_is_no_matrix_is_averaged_as_it_is() -> None:
    torch.manual_seed(2)
    vectors = torch.randn(1, 2, ELEMENTS)
    sums, owed, _ = summed(vectors, 1)[0]
    for place in (slice(108, 115), slice(175, 179)):
        torch.testing.assert_close(sums[0][place], vectors[0].mean(0)[place])
        assert not owed[place].any()


def test_the_factors_are_those_of_the_power_method() -> None:
    torch.manual_seed(3)
    vectors = torch.randn(1, 2, ELEMENTS)
    found = summed(vectors, 1)[0][0][0][:108].view(12, 9)
    q = torch.randn(9 + 15, generator=torch.Generator().manual_seed(20_190_531))[:9]
    matrix = vectors[0].mean(0)[:108].view(12, 9)
    p = matrix @ q
    p = p / p.norm()
    torch.testing.assert_close(found, torch.outer(p, matrix.T @ p), rtol=0, atol=1e-4)


def test_a_matrix_of_low_rank_is_found_exactly() -> None:
    torch.manual_seed(4)
    step = torch.zeros(2, ELEMENTS)
    left, right = torch.randn(12, 2), torch.randn(2, 9)
    for its in step:
        its[:108] = (left @ torch.randn(2, 2) @ right).flatten()
    sums = summed(torch.stack([step]), 2)[0][0]
    torch.testing.assert_close(sums[0], step.mean(0), rtol=0, atol=1e-3)


def test_a_ranks_share_of_the_factors_is_what_is_sent() -> None:
    sent = summed(torch.randn(1, 2, ELEMENTS), 1)[0][2]
    assert sent == 4 * ((12 + 4 + 7 + 4) // 2 * 2 + 1 + (9 + 15))  # 27 is odd: one block is an element longer


@pytest.mark.parametrize("parts", [2, 3, 4, 100])
def test_parts_have_the_same_mean_as_the_whole(parts: int) -> None:
    torch.manual_seed(6)
    vectors = torch.randn(4, 2, ELEMENTS)
    whole, in_parts = summed(vectors, 2)[1], summed(vectors, 2, parts=parts)[1]
    for one, other in zip((*whole[0], whole[1]), (*in_parts[0], in_parts[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("bad", [0.0, torch.inf])
def test_parts_that_overlap_have_the_means_of_parts_one_after_the_other(bad: float) -> None:
    """Also after dense updates, without a batch (rank 2, once), and after a mean that is not finite."""
    torch.manual_seed(7)
    vectors = torch.randn(6, 3, ELEMENTS)
    vectors[3, 0, 5] += bad

    def reduce(transport: VirtualTransport, overlap: bool) -> tuple[list[Tensor], Tensor, Tensor]:
        trace, found = Trace(False, transport), []
        inner, like = RingAllReduce(transport, Dense(), trace), torch.zeros(ELEMENTS)
        made = LowRankReducer(inner, LAYOUT, LowRankConfig(2, 1), like, trace, transport)
        parts = made.parts(ELEMENTS, 4)
        task = BackgroundTask(transport, trace, made.stages, len(parts) if overlap else 1)
        for update, step in enumerate(vectors):
            own, weight = step[transport.rank].clone(), int((update, transport.rank) != (2, 2))
            for part in reversed(parts):
                task.give(own[part], update, weight, part.start)
            for part in reversed(parts):
                own[part] /= task.take()[1].divisor
            found.append(own)
        return found, made.residual.clone(), made.state()["low-rank.q"].clone()

    runs = [together(engine([1] * 3), *[partial(reduce, overlap=overlap)] * 3) for overlap in (True, False)]
    for (means, left, factors), (its, other, same) in zip(*runs, strict=True):
        torch.testing.assert_close(torch.stack(means), torch.stack(its), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(left, other)
        assert torch.equal(factors, same)


def test_parts_end_between_parameters() -> None:
    trace = Trace(False, LocalTransport())
    made = LowRankReducer(
        RingAllReduce(LocalTransport(), Dense(), trace), LAYOUT, LowRankConfig(1), torch.zeros(ELEMENTS), trace, None
    )
    assert made.parts(ELEMENTS, 1) == [slice(0, 179)]
    assert made.parts(ELEMENTS, 2) == [slice(0, 108), slice(108, 179)]
    assert made.parts(ELEMENTS, 100) == [slice(0, 108), slice(108, 115), slice(115, 175), slice(175, 179)]


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("place", [5, 110])  # in a matrix; in a parameter that is not compressed
def test_what_is_not_finite_is_so_everywhere_and_leaves_residual_and_factors_as_they_were(place: int, parts: int) -> None:
    torch.manual_seed(5)
    vectors = torch.randn(4, 2, ELEMENTS)
    vectors[1, 1, place] = torch.inf
    without = summed(vectors[[0, 2, 3]], 1, parts=parts)
    for (means, owed, _), (others, expected, _) in zip(summed(vectors, 1, parts=parts), without, strict=True):
        assert not torch.isfinite(means[1]).all()
        assert torch.equal(means[2], others[1])
        assert torch.equal(means[3], others[2])
        assert torch.equal(owed, expected)
