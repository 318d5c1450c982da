"""Notices that the source and the target of text are exchanged, or of the same language, from how often pieces occur."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_PIECES = 1_000_000  # of each side of a corpus that are counted
_FEWEST = 50  # pieces of each side of a set that suffice to judge it
_FEWEST_OF_PAIR = 8  # pieces of each side of a single pair that suffice
# Nats per piece by which the sides of a corpus must differ. English and German have 3 to 4. A corpus with a tenth of the pairs
# in the opposite direction has 1.3, and a set in that direction is no mistake.
_DIFFERENT = 2.0
_SOMEWHAT = 1.0  # the same to judge single pairs, of which only the share counts
_ALIKE, _ENOUGH = 0.2, 10  # two halves of a text differ by less [nats per piece], if it has as many times each piece

EXCHANGED = (  # what to tell the user
    "its source looks like the targets of the training corpus, and its target like the sources; are its files exchanged?"
)
Ids = Sequence[np.ndarray]  # the piece ids of each line


class Sides:
    """How well the sources of a corpus explain a text, compared with its targets."""

    def __init__(self, source: np.ndarray, target: np.ndarray) -> None:
        """source, target: the piece ids of all sources and of all targets (pieces,), one after the other."""
        sides = [np.asarray(side[:_PIECES], dtype=np.int64) for side in (source, target)]
        size = 1 + max((int(ids.max()) for ids in sides if len(ids)), default=0)
        counts = [np.bincount(side, minlength=size) + 1.0 for side in sides]
        self._enough = all(len(side) > _ENOUGH * int((its > 1).sum()) for side, its in zip(sides, counts, strict=True))
        # By piece [nats]: positive for those of sources. The last is for pieces that the corpus lacks.
        self._ratio = np.append(np.log(counts[0] / counts[0].sum()) - np.log(counts[1] / counts[1].sum()), 0.0)
        self._of_source, self._of_target = (self._score(side) if len(side) else 0.0 for side in sides)

    @property
    def differ(self) -> bool:
        """Whether the sides differ so much that exchanged ones are noticed."""
        return min(self._of_source, -self._of_target) > _DIFFERENT

    @property
    def alike(self) -> bool:
        """Whether the sides look like the same language; False if there is too little text."""
        return self._enough and max(self._of_source, -self._of_target) < _ALIKE

    def exchanged(self, source: np.ndarray, target: np.ndarray) -> bool:
        """Whether a source (pieces,) looks like the targets, and its target like the sources."""
        return self._score(source) < self._of_target / 2 and self._score(target) > self._of_source / 2

    def share_exchanged(self, sources: Ids, targets: Ids) -> float:
        """The share of exchanged pairs among those that are long enough to judge; 0 if the sides are too similar."""
        if min(self._of_source, -self._of_target) < _SOMEWHAT:
            return 0.0
        judged = [
            self.exchanged(source, target)
            for source, target in zip(sources, targets, strict=True)
            if min(len(source), len(target)) >= _FEWEST_OF_PAIR
        ]
        return sum(judged) / max(1, len(judged))

    def _score(self, ids: np.ndarray) -> float:
        return float(self._ratio[np.minimum(ids, len(self._ratio) - 1)].mean())


def swapped(corpus: tuple[np.ndarray, np.ndarray], test: tuple[Ids, Ids]) -> bool:
    """Whether the source of a test set looks like the targets of a corpus, and the target like its sources, beyond doubt.

    corpus: the piece ids of its sources and targets (pieces,), one after the other. test: those of each line.
    """
    source, target = (np.concatenate([*side, np.zeros(0, np.int64)]).astype(np.int64) for side in test)
    if min(len(source), len(target)) < _FEWEST:
        return False
    sides = Sides(*corpus)
    return sides.differ and sides.exchanged(source, target)
