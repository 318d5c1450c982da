"""How good word alignments are, compared with those that people made."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple


class Quality(NamedTuple):
    """Fractions; `error` is the alignment error rate."""

    precision: float
    recall: float
    error: float


def quality(
    found: Sequence[AbstractSet[tuple[int, int]]],
    sure: Sequence[AbstractSet[tuple[int, int]]],
    possible: Sequence[AbstractSet[tuple[int, int]]],
) -> Quality:
    """Compare the links of each pair with those that people made (Och and Ney 2003, section 6).

    sure: links that must be found. possible: links that may be found; sure ones need not be repeated.
    """
    right = sum(len(links & its) for links, its in zip(found, sure, strict=True))
    allowed = sum(len(links & (its | more)) for links, its, more in zip(found, sure, possible, strict=True))
    made, wanted = sum(map(len, found)), sum(map(len, sure))
    return Quality(
        precision=allowed / made if made else 1.0,
        recall=right / wanted if wanted else 1.0,
        error=1 - (right + allowed) / (made + wanted) if made + wanted else 0.0,
    )
