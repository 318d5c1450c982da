"""Notices that the source and the target of a validation set are exchanged, from how often pieces occur."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_PIECES = 1_000_000  # of each side of a corpus that are counted
_FEWEST = 50  # pieces of each side of a set that suffice to judge it
# Nats per piece by which the sides of a corpus must differ. English and German have 3 to 4. A corpus with a tenth of the pairs
# in the opposite direction has 1.3, and a set in that direction is no mistake.
_DIFFERENT = 2.0


def swapped(corpus: tuple[np.ndarray, np.ndarray], test: tuple[Sequence[np.ndarray], Sequence[np.ndarray]]) -> bool:
    """Whether the source of a test set looks like the targets of a corpus, and the target like its sources, beyond doubt.

    corpus: the piece ids of its sources and targets (pieces,), one after the other. test: those of each line.
    """
    sides = [np.asarray(side[:_PIECES], dtype=np.int64) for side in corpus]
    source, target = (np.concatenate([*side, np.zeros(0, np.int64)]).astype(np.int64) for side in test)
    if min(len(source), len(target)) < _FEWEST:
        return False
    size = 1 + max(int(ids.max()) for ids in (*sides, source, target))
    counts = [np.bincount(side, minlength=size) + 1.0 for side in sides]
    ratio = np.log(counts[0] / counts[0].sum()) - np.log(counts[1] / counts[1].sum())
    # How much better the sources explain a text than the targets do [nats per piece]: positive for sources.
    of_source, of_target = (float(ratio[side].mean()) for side in sides)
    differ = min(of_source, -of_target) > _DIFFERENT
    return differ and bool(ratio[source].mean() < of_target / 2 and ratio[target].mean() > of_source / 2)
