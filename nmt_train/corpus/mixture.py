"""Mixes several training corpora: selects how many and which pairs of each corpus are in an epoch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nmt_train.common.errors import UserError
from nmt_train.corpus import CorpusConfig, CorpusPart

_PASSES = 0x9A55  # part of the random seed, so that these numbers differ from those that shuffle an epoch
_SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")  # pieces that every vocabulary has


def parts(config: CorpusConfig) -> list[CorpusPart]:
    """The training corpora of a configuration; UserError if weights or stages contradict each other."""
    given = config.train
    found = [part for part in given if isinstance(part, CorpusPart)] if isinstance(given, list) else []
    if not found:
        return [CorpusPart(files=given)]  # type: ignore[arg-type]
    weighted = [part.weight is not None for part in found]
    if any(weighted) and not all(weighted):
        raise UserError("corpus.train: give every corpus a weight, or none")
    if any(weighted) and config.temperature is not None:
        raise UserError("corpus.temperature: the corpora have weights, which it would replace; remove one of them")
    if all(part.until is not None for part in found):
        raise UserError("corpus.train: every corpus ends (until), and later epochs would be empty; remove one until")
    for part in found:
        if part.tag in _SPECIAL or any(map(str.isspace, part.tag)):
            raise UserError(f"corpus.train: tag: {part.tag!r} cannot be one piece; write a word such as <2de>")
        if part.until is not None and part.until.unit != "e":
            raise UserError(f"corpus.train: until: {part.until} is not a number of epochs; write it as 3e")
    return found


def label(found: Sequence[CorpusPart], number: int) -> str:
    """The name of a corpus in error messages."""
    return "corpus.train" if len(found) == 1 else f"corpus.train, {found[number].name or f'corpus {number + 1}'}"


class Mixture:
    """Selects the pairs of each epoch. They depend only on the seed and the epoch, so they are the same on all ranks.

    An epoch has as many pairs as all corpora in use in that epoch. Without weights, each of their pairs occurs once. With
    weights (or a temperature), each corpus has a share of the epoch. Its pairs are drawn in passes over the corpus, each in a
    new random order, so that after n passes each pair has occurred n times.
    """

    def __init__(self, config: CorpusConfig, kept: Sequence[np.ndarray], seed: int) -> None:
        """kept: for each corpus, the numbers of the pairs to train on."""
        self._parts, self._kept, self._seed = parts(config), kept, seed
        self._last: dict[int, tuple[int, np.ndarray]] = {}  # for each corpus, the order of its last pass, with its number
        self._power = None if config.temperature is None else 1.0 / config.temperature

    def counts(self, epoch: int) -> list[int]:
        """How many pairs of each corpus are in this epoch."""
        used = [part.until is None or epoch < part.until.amount for part in self._parts]
        sizes = [len(kept) * now for kept, now in zip(self._kept, used, strict=True)]
        if self._power is not None:
            weights = [size**self._power for size in sizes]
        elif self._parts[0].weight is not None:
            weights = [part.weight or 0.0 if size else 0.0 for part, size in zip(self._parts, sizes, strict=True)]
        else:
            return sizes
        ends = np.round(np.cumsum(weights) / sum(weights) * sum(sizes)).astype(int)
        return [int(count) for count in np.diff(ends, prepend=0)]

    def described(self) -> list[str]:
        """Lines for the log: the shares of the corpora at the start and after each change; empty for a single corpus."""
        changes = sorted({0, *(int(part.until.amount) for part in self._parts if part.until is not None)})
        found = []
        for epoch in changes if len(self._parts) > 1 else []:
            counts = self.counts(epoch)
            shares = ", ".join(
                f"{part.name or f'corpus {number}'} {count:,} of its {len(kept):,} pairs ({count / sum(counts):.1%})"
                for number, (part, kept, count) in enumerate(zip(self._parts, self._kept, counts, strict=True), 1)
            )
            found.append(f"corpus: from epoch {epoch + 1} on, an epoch has {sum(counts):,} pairs: {shares}")
        return found

    def pairs(self, epoch: int) -> np.ndarray:
        """The numbers of the pairs of this epoch (pairs,), in arbitrary order."""
        found = []
        for number, (kept, count) in enumerate(zip(self._kept, self.counts(epoch), strict=True)):
            if count == len(kept) and self._power is None and self._parts[number].weight is None:
                found.append(kept)
            elif count:
                before = sum(self.counts(earlier)[number] for earlier in range(epoch))
                found.append(self._draw(number, before, before + count))
        return np.concatenate(found) if len(found) > 1 else found[0]

    def _draw(self, number: int, first: int, last: int) -> np.ndarray:
        """Pairs `first` to `last` - 1 of the concatenation of all passes over corpus `number`."""
        kept = self._kept[number]
        passes = range(first // len(kept), (last - 1) // len(kept) + 1)
        orders = [self._pass(number, turn) for turn in passes]
        start = passes[0] * len(kept)
        return np.concatenate(orders)[first - start : last - start]

    def _pass(self, number: int, turn: int) -> np.ndarray:
        """The order of one pass over a corpus; the last one is kept, because an epoch may need only a part of it."""
        if self._last.get(number, (-1,))[0] != turn:
            random = np.random.default_rng([self._seed, number, turn, _PASSES])
            self._last[number] = turn, random.permutation(self._kept[number])
        return self._last[number][1]
