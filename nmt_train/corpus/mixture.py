"""Mixes several training corpora: selects how many and which pairs of each corpus are in an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from nmt_train.corpus import CorpusConfig

_PASSES = 0x9A55  # part of the random seed, so that these numbers differ from those that shuffle an epoch


class Mixture:
    """Selects the pairs of each epoch. They depend only on the seed and the epoch, so they are the same on all ranks.

    An epoch has as many pairs as all corpora in use in that epoch, and without weights, each of their pairs occurs once. With
    weights, a temperature or another length (`corpus.epoch`), each corpus has a share of the epoch. Its pairs are drawn in
    passes over the corpus, each in a new random order, so that after n passes each pair has occurred n times.
    """

    def __init__(self, config: CorpusConfig, kept: Sequence[np.ndarray], seed: int) -> None:
        """kept: for each corpus, the numbers of the pairs to train on."""
        self._parts, self._kept, self._seed = config.parts, kept, seed
        # The epochs in which a stage begins: the corpora in use change.
        self._stages = [0, *config.stages]
        self._length = config.epoch
        self._power = None if config.temperature is None else 1.0 / config.temperature

    @property
    def last_stage(self) -> int:
        """The epoch in which the corpora in use change for the last time."""
        return self._stages[-1]

    def counts(self, epoch: int) -> list[int]:
        """How many pairs of each corpus are in this epoch."""
        sizes = [len(kept) * part.used_in(epoch) for part, kept in zip(self._parts, self._kept, strict=True)]
        if self._power is not None:
            weights = [size**self._power for size in sizes]
        elif self._parts[0].weight is not None:
            weights = [(part.weight_in(epoch) or 0.0) * (size > 0) for part, size in zip(self._parts, sizes, strict=True)]
        elif self._length is None:
            return sizes
        else:
            weights = [float(size) for size in sizes]
        ends = np.round(np.cumsum(weights) / sum(weights) * (self._length or sum(sizes))).astype(int)
        return [int(count) for count in np.diff(ends, prepend=0)]

    def described(self) -> list[str]:
        """Lines for the log: the shares of the corpora at the start and after each change; empty for a single corpus."""
        found = []
        for epoch in self._stages if len(self._parts) > 1 else []:
            counts = self.counts(epoch)
            shares = ", ".join(
                f"{part.name or f'corpus {number}'} {count:,} pairs ({count / sum(counts):.1%}; it has {len(kept):,})"
                for number, (part, kept, count) in enumerate(zip(self._parts, self._kept, counts, strict=True), 1)
            )
            found.append(f"corpus: from epoch {epoch + 1} on, an epoch has {sum(counts):,} pairs: {shares}")
        return found

    def pairs(self, epoch: int) -> np.ndarray:
        """The numbers of the pairs of this epoch (pairs,), in arbitrary order."""
        found, before = [], self._drawn(epoch)
        for number, (kept, count) in enumerate(zip(self._kept, self.counts(epoch), strict=True)):
            if count == len(kept) and (self._power, self._length, self._parts[number].weight) == (None, None, None):
                found.append(kept)
            elif count:
                found.append(self._draw(number, before[number], before[number] + count))
        return np.concatenate(found) if len(found) > 1 else found[0]

    def _drawn(self, epoch: int) -> list[int]:
        """How many pairs of each corpus are in all epochs before `epoch`."""
        total = [0] * len(self._parts)
        for start, end in pairwise([*(stage for stage in self._stages if stage < epoch), epoch]):
            total = [before + (end - start) * count for before, count in zip(total, self.counts(start), strict=True)]
        return total

    def _draw(self, number: int, first: int, last: int) -> np.ndarray:
        """Pairs `first` to `last` - 1 of the concatenation of all passes over corpus `number`."""
        kept = self._kept[number]
        passes = range(first // len(kept), (last - 1) // len(kept) + 1)
        orders = [np.random.default_rng([self._seed, number, turn, _PASSES]).permutation(kept) for turn in passes]
        start = passes[0] * len(kept)
        return np.concatenate(orders)[first - start : last - start]
