"""Which surviving rank sends which part of the state."""

from __future__ import annotations

from itertools import permutations

import pytest

from nmt_train.training.recovery_plan import Inventory, Source
from nmt_train.transport import Lost

WHOLE = slice(0, 10)


def source(rank: int, updates: int, *, exact: bool = True, start: int = 0, stop: int = 10, own: bool = False) -> Source:
    """own: the slice that the rank's optimizer updates, instead of what it has received."""
    return Source(rank, 0 if own else 1, start, stop, updates, ["parameters"], exact, own)


def taken(*sources: Source, receiver: int = 0) -> list[tuple[int, int, int]]:
    """Rank, start and stop of what the receiver gets."""
    inventory = Inventory([], WHOLE.stop)
    inventory.sources = list(sources)
    moves = inventory.plan([WHOLE if rank == receiver else slice(0, 0) for rank in range(receiver + 1)])
    assert [move.name for move in moves] == ["parameters"] * len(moves)
    return [(move.source.rank, move.start, move.stop) for move in moves]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_the_newest_exact_parameters_are_taken(order: tuple[int, ...]) -> None:
    there = [source(0, 4), source(1, 7), source(2, 9, exact=False)]
    assert taken(*(there[its] for its in order)) == [(1, 0, 10)]


def test_of_equally_new_ones_those_of_the_optimizer_are_taken_then_the_receivers_own() -> None:
    assert taken(source(0, 4), source(1, 4, own=True), source(2, 4)) == [(1, 0, 10)]
    assert taken(source(0, 4), source(1, 4), source(2, 4), receiver=2) == [(2, 0, 10)]


def test_every_part_is_taken_from_the_newest_that_has_it() -> None:
    assert taken(source(0, 4), source(1, 5, start=2, stop=6)) == [(0, 0, 2), (1, 2, 6), (0, 6, 10)]


def test_parts_that_nobody_has_are_said() -> None:
    with pytest.raises(Lost, match="all ranks that held some part of the parameters have ended"):
        taken(source(0, 4, stop=6), source(1, 5, start=7))
