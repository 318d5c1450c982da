from __future__ import annotations

import numpy as np
import pytest

from nmt_train.corpus.swapped import Sides, swapped

RANDOM = np.random.default_rng(1)
LEFT, RIGHT = (RANDOM.integers(low, low + 500, 20_000) for low in (4, 400))  # a fifth of the pieces is common to both


def lines(ids: np.ndarray) -> list[np.ndarray]:
    return np.array_split(ids[:400], 40)


def test_exchanged_sides_are_noticed_and_right_ones_are_not() -> None:
    assert swapped((LEFT, RIGHT), (lines(RIGHT), lines(LEFT)))
    assert not swapped((LEFT, RIGHT), (lines(LEFT), lines(RIGHT)))


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_a_set_in_the_less_common_direction_of_a_corpus_is_right(share: float) -> None:
    few = int(share * len(LEFT))
    both = (np.concatenate([LEFT, RIGHT[:few]]), np.concatenate([RIGHT, LEFT[:few]]))
    assert not swapped(both, (lines(RIGHT), lines(LEFT)))


def test_only_exchanged_sides_are_pointed_out() -> None:
    assert not swapped((LEFT, RIGHT), (lines(LEFT), lines(LEFT)))
    assert not swapped((LEFT, RIGHT), (lines(RIGHT), lines(RIGHT)))
    assert not swapped((LEFT, LEFT[::-1]), (lines(LEFT), lines(LEFT)))


def test_a_few_pieces_prove_nothing() -> None:
    assert not swapped((LEFT, RIGHT), (lines(RIGHT[:40]), lines(LEFT[:40])))
    assert not swapped((LEFT, RIGHT), ([], []))


def test_the_share_of_exchanged_pairs_is_found_and_short_ones_are_not_judged() -> None:
    sides = Sides(LEFT, RIGHT)
    sources, targets = lines(LEFT)[:30] + lines(RIGHT)[:10], lines(RIGHT)[:30] + lines(LEFT)[:10]
    assert sides.share_exchanged(sources, targets) == 0.25
    short = [ids[:5] for ids in sources], [ids[:5] for ids in targets]
    assert sides.share_exchanged(*short) == 0.0


def test_sides_of_the_same_language_are_alike_if_there_is_enough_text() -> None:
    assert Sides(LEFT[::2], LEFT[1::2]).alike
    assert not Sides(LEFT, RIGHT).alike
    assert not Sides(LEFT[:100], LEFT[100:200]).alike
