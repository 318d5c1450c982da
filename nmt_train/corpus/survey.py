"""One pass over the training corpora before the expensive work: it checks every line, and draws random samples."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from nmt_train.common.errors import UserError
from nmt_train.corpus import CorpusConfig
from nmt_train.corpus.alignment import read_aligned
from nmt_train.corpus.pass_bar import PassBar
from nmt_train.corpus.text import read_pairs, refuse_empty, weights_of

Item = TypeVar("Item")

_LONG = 4000  # characters of a line
SAMPLE_LINES = 1_000_000  # random ones, to train a vocabulary on
_CHARACTERS = 50_000_000  # of the lines to train a vocabulary on; SentencePiece takes about 25 bytes for each
_PAIRS = 10_000  # sampled to estimate how many pairs are over-long
_STEP = 10_000  # pairs between two looks at the progress
_SURE = 3.0  # standard errors of that estimate


class Sample(Generic[Item]):
    """A random sample of at most `most` items and `largest` characters, in their order; the same in every run."""

    def __init__(self, most: int, largest: float) -> None:
        self._most, self._left, self._random = most, largest, random.Random(1)
        self._kept: list[tuple[float, int, int, Item]] = []  # a heap: the first item is the next to be dropped
        self._number, self._limit = 0, 1.0

    def add(self, item: Item, characters: int) -> None:
        self._number += 1
        priority = self._random.random()
        if priority >= self._limit:
            return
        heapq.heappush(self._kept, (-priority, self._number, characters, item))
        self._left -= characters
        while len(self._kept) > self._most or (self._left < 0 and len(self._kept) > 1):
            dropped, _, freed, _ = heapq.heappop(self._kept)
            self._limit, self._left = -dropped, self._left + freed

    @property
    def complete(self) -> bool:
        """Whether all items were kept."""
        return len(self._kept) == self._number

    @property
    def items(self) -> list[Item]:
        return [item for _, _, _, item in sorted(self._kept, key=lambda entry: entry[1])]


class _Drawn(NamedTuple):
    """lines: for each vocabulary to train, those of its sides. complete: whether these are all. pairs: to estimate lengths.

    counts: the number of pairs of each corpus.
    """

    lines: list[list[str]]
    complete: bool
    pairs: list[tuple[str, str]]
    counts: list[int]

    @property
    def total(self) -> int:
        return sum(self.counts)


class Survey:
    """What one pass over the training corpora draws. The pass is made when it is first needed.

    It raises UserError for a line that cannot be read, sides with different numbers of lines, a side without text, and
    sentence weights or alignments that are wrong or of another number.
    """

    def __init__(
        self, corpus: CorpusConfig, characters: int = _CHARACTERS, watch: Sequence[Callable[[tuple[str, str]], None]] = ()
    ) -> None:
        """characters: at most as many are drawn for a vocabulary. watch: for each corpus, what is called with all its pairs."""
        self._corpus, self._characters, self._watch = corpus, characters, watch

    @cached_property
    def _drawn(self) -> _Drawn:
        corpus, counts = self._corpus, []
        lines = [Sample[str](SAMPLE_LINES, self._characters) for _ in corpus.vocabulary.sizes]
        pairs = Sample[tuple[str, str]](_PAIRS, float("inf"))
        for number, part in enumerate(corpus.parts):
            key, count = corpus.label(number), 0
            source_filled = target_filled = False
            for count, pair in enumerate(self._pairs(number), 1):  # noqa: B007
                pairs.add(pair, 0)
                source, target = (side != "" and not side.isspace() for side in pair)
                if source and target:
                    for place, side in enumerate(pair):
                        for line in (side,) if len(side) <= _LONG else _cut(side):
                            lines[place % len(lines)].add(line, len(line))
                source_filled, target_filled = source_filled or source, target_filled or target
            refuse_empty(key, source_filled, target_filled)
            if part.sentence_weights is not None:
                weights_of(part, key, count, corpus.max_ratio)
            if part.alignments is not None:
                for _ in read_aligned(part, key, corpus.max_ratio):  # which checks them
                    pass
            counts.append(count)
        return _Drawn([drawn.items for drawn in lines], all(drawn.complete for drawn in lines), pairs.items, counts)

    def _pairs(self, number: int) -> Iterator[tuple[str, str]]:
        """The pairs of a corpus; shows how many were read."""
        watch, key = self._watch[number] if self._watch else None, self._corpus.label(number)
        with PassBar(f"reading {key}") as bar:
            pairs = read_pairs(self._corpus.parts[number].files, key, self._corpus.max_ratio)
            for count, pair in enumerate(pairs, 1):
                if watch is not None:
                    watch(pair)
                yield pair
                if not count % _STEP:
                    bar.advance(_STEP)

    @property
    def lines(self) -> list[list[str]]:
        """Random lines of both sides of the pairs with text on both, in parts of at most _LONG characters; for separate
        vocabularies, those of the source, and those of the target.
        """
        return self._drawn.lines

    @property
    def complete(self) -> bool:
        """Whether `lines` are all lines."""
        return self._drawn.complete

    @property
    def counts(self) -> list[int]:
        """The number of pairs of each corpus."""
        return self._drawn.counts

    def check_lengths(self, measure: Callable[[Sequence[str], int], Sequence[int]], unit: str = "pieces") -> None:
        """Raise UserError if training would surely leave out too many pairs.

        measure: the lengths of lines of a side, 0 or 1, or lower bounds of them. unit: what these lengths count.
        """
        pairs = self._drawn.pairs
        lengths = [np.array(measure([pair[side] for pair in pairs], side), dtype=np.int64) for side in (0, 1)]
        refuse_left_out(self._corpus, np.minimum(*lengths), np.maximum(*lengths), self._drawn.total, unit)


def refuse_left_out(corpus: CorpusConfig, shortest: np.ndarray, longest: np.ndarray, total: int, unit: str = "pieces") -> None:
    """Raise UserError if training leaves out more pairs than `corpus.max_skipped`, for their lengths or an empty side.

    shortest, longest: the length of the shorter and the longer side (pairs,) of all `total` pairs, or of a random sample of
    them. unit: what lengths count.
    """
    empty, long = shortest == 0, (shortest > 0) & (longest > corpus.max_length)
    count, left_out = len(longest), int((empty | long).sum())
    share = left_out / count
    error = (share * (1 - share) / count) ** 0.5 if count < total else 0.0
    if share - _SURE * error <= corpus.max_skipped:
        return
    of = f"{count:,} pairs" + " drawn at random" * (count < total)
    counts = f"{int(empty.sum()):,} with an empty side, {int(long.sum()):,} over-long, of {of}"
    marks = {percent: int(np.percentile(longest, percent, method="higher")) for percent in (50, 90, 95, 99)}
    reach = ", ".join(f"{length} in {percent}%" for percent, length in marks.items())
    raise UserError(
        f"corpus.train: {share:.1%} of the pairs would be left out ({counts}), more than corpus.max_skipped"
        f" {corpus.max_skipped:.1%}; raise it or corpus.max_length {corpus.max_length}: the longer side has up to {reach} of"
        f" these pairs [{unit}]"
    )


def _cut(line: str) -> Iterator[str]:
    """The parts of a line that are short enough for SentencePiece, whose training time grows with the square of the length."""
    start = 0
    while len(line) - start > _LONG:
        space = line.rfind(" ", start + 1, start + _LONG)
        end = space if space > 0 else start + _LONG
        yield line[start:end]
        start = end
    yield line[start:]
