"""Means in one or 1.6 bits per element: the same everywhere, short, and what they leave out comes later."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from virtual import engine, together

from nmt_train.replicas.low_bit import LowBitReducer
from nmt_train.simulation.virtual_transport import VirtualTransport
from nmt_train.strategy.config import LowBitConfig
from nmt_train.trace import Trace
from nmt_train.transport import Tag
from nmt_train.transport.local import LocalTransport

LAYOUT = [("weight", (12, 9)), ("bias", (7,)), ("other", (4, 3, 5)), ("small", (2, 2))]
ELEMENTS = 12 * 9 + 7 + 60 + 4
DEFAULT = LowBitConfig()


def reducer(transport: VirtualTransport | LocalTransport, config: LowBitConfig = DEFAULT) -> LowBitReducer:
    return LowBitReducer(transport, LAYOUT, config, torch.zeros(ELEMENTS), Trace(False, transport))


def averaged(
    vectors: Tensor, weights: list[int] | None = None, parts: int = 1, config: LowBitConfig = DEFAULT
) -> list[tuple[list[Tensor], Tensor, int]]:
    """Of every rank, for `vectors` (steps, ranks, elements): the means, what is left to be sent, bytes sent."""

    def reduce(transport: VirtualTransport) -> tuple[list[Tensor], Tensor, int]:
        made, found = reducer(transport, config), []
        for update, step in enumerate(vectors):
            own = step[transport.rank].clone()
            weight = 1 if weights is None else weights[transport.rank]
            for part in reversed(made.parts(ELEMENTS, parts)):
                assert made.reduce(own[part], update, weight, part.start).divisor == 1
            found.append(own)
        return found, made.residual.clone(), sum(transport.sent[tag][1] for tag in (Tag.REDUCE, Tag.MEAN))

    ranks = vectors.shape[1]
    return together(engine([1] * ranks), *[reduce] * ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "parts"), [(2, 1), (2, 3), (3, 100), (20, 1), (20, 3)])
@pytest.mark.parametrize(("up", "down"), [(2, 2), (2, 3), (3, 3), (15, 15), (255, 2)])
def test_all_have_the_same_and_nothing_is_lost(up: int, down: int, ranks: int, parts: int) -> None:
    torch.manual_seed(1)
    vectors = torch.randn(5, ranks, ELEMENTS)
    found = averaged(vectors, parts=parts, config=LowBitConfig(up, down))
    for means, _, _ in found:
        assert all(torch.equal(one, other) for one, other in zip(means, found[0][0], strict=True))
    owed = sum((left for _, left, _ in found), torch.zeros(ELEMENTS))
    torch.testing.assert_close(ranks * sum(found[0][0]) + owed, vectors.sum((0, 1)), rtol=0, atol=2e-5 * ranks)


def test_ranks_may_interleave_the_stages_of_parts_differently() -> None:
    """Each order has the parts of every stage in turn: that is all that ranks must have in common."""
    orders = [(0, 0, 0, 1, 1, 1, 2, 2, 2), (0, 1, 2, 0, 1, 2, 0, 1, 2), (0, 1, 0, 2, 1, 2, 0, 1, 2)]
    torch.manual_seed(4)
    vectors = torch.randn(2, 3, ELEMENTS)

    def reduce(transport: VirtualTransport) -> tuple[list[Tensor], Tensor]:
        made, found = reducer(transport), []
        for update, step in enumerate(vectors):
            own = step[transport.rank].clone()
            stages = [made.stages(own[part], update, 1, part.start) for part in made.parts(ELEMENTS, 3)]
            for part in orders[transport.rank]:
                next(stages[part], None)
            found.append(own)
        return found, made.residual.clone()

    for (means, left), (expected, its, _) in zip(
        together(engine([1] * 3), *[reduce] * 3), averaged(vectors, parts=3), strict=True
    ):
        assert all(torch.equal(one, other) for one, other in zip(means, expected, strict=True))
        assert torch.equal(left, its)


def test_the_mean_is_about_right_at_once() -> None:
    torch.manual_seed(2)
    vectors = torch.randn(1, 1, ELEMENTS).expand(1, 4, ELEMENTS)
    mean = averaged(vectors)[0][0][0]
    cosine = torch.nn.functional.cosine_similarity(mean, vectors[0, 0], dim=0)
    assert cosine > 0.75


@pytest.mark.slow
def test_batches_count_by_their_tokens() -> None:
    vectors = torch.tensor([1.0, -1.0])[:, None].expand(300, 2, ELEMENTS)
    mean = sum(averaged(vectors, [3, 1])[0][0][100:]) / 200
    torch.testing.assert_close(mean, torch.full((ELEMENTS,), 0.5), rtol=0, atol=0.1)


def test_a_rank_without_a_batch_keeps_its_residual_and_still_serves_its_share() -> None:
    def reduce(transport: VirtualTransport) -> tuple[list[Tensor], list[Tensor]]:
        made, residuals, means = reducer(transport), [], []
        torch.manual_seed(transport.rank)
        for weights in ((1, 1, 1), (1, 1, 0)):
            weight = weights[transport.rank]
            vector = torch.randn(ELEMENTS) * weight
            made.reduce(vector, 0, weight)
            means.append(vector)
            residuals.append(made.residual.clone())
        return means, residuals

    found = together(engine([1] * 3), *[reduce] * 3)
    assert all(torch.equal(means[1], found[0][0][1]) for means, _ in found)
    before, after = found[2][1]
    share = slice(ELEMENTS * 2 // 3 - 15, ELEMENTS)  # of the last rank; it ends and begins at most a row elsewhere
    assert torch.equal(before[: share.start], after[: share.start])
    assert not torch.equal(before[share], after[share]), "what the mean leaves out of its share is added"


def test_one_rank_alone_loses_nothing() -> None:
    vector = torch.randn(ELEMENTS)
    found = vector.clone()
    assert reducer(LocalTransport()).reduce(found, 0, 7) == (1.0, 7)
    assert torch.equal(found, vector)


def test_a_rank_sends_a_bit_of_each_element_of_others_and_its_own_mean_to_all() -> None:
    vectors = torch.randn(1, 2, ELEMENTS)
    (_, _, first), (_, _, second) = averaged(vectors, config=LowBitConfig(2, 2))
    magnitudes = 12 + 9 + 1 + 7 + 4 + 15 + 2 + 2
    bits = sum(-(-elements // 8) for elements in (90, 89))  # rows of 9: the halves are 90 and 89 elements
    assert first + second == 2 * (2 * 4 + magnitudes + 9 + bits)  # the weight is cut, so its columns are sent twice


@pytest.mark.parametrize("most", [1, 2, 3, 4, 100])
def test_parts_end_between_rows(most: int) -> None:
    parts = reducer(LocalTransport()).parts(ELEMENTS, most)
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == ELEMENTS
    ends = {*range(0, 109, 9), 115, 130, 145, 160, 175, 177, 179}
    assert {part.stop for part in parts} <= ends
    assert len(parts) == (len(ends) - 1 if most == 100 else most)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("place", [5, 170])
def test_what_is_not_finite_is_so_everywhere_and_leaves_the_residual_as_it_was(place: int, parts: int) -> None:
    torch.manual_seed(5)
    vectors = torch.randn(3, 2, ELEMENTS)
    vectors[1, 1, place] = torch.inf
    without = averaged(vectors[[0, 2]], parts=parts)
    for (means, owed, _), (others, expected, _) in zip(averaged(vectors, parts=parts), without, strict=True):
        assert not torch.isfinite(means[1]).all()
        assert torch.equal(means[2], others[1])
        assert torch.equal(owed, expected)
