"""Batches of a store: seed and epoch determine their order; pairs are shuffled, then grouped by length within a window."""

from __future__ import annotations

import itertools
import math
import threading
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch

from nmt_train.common.duration import Duration
from nmt_train.common.errors import UserError
from nmt_train.corpus import BatchConfig, CorpusConfig
from nmt_train.corpus.batch import Batch, Turn, assemble
from nmt_train.corpus.data_shard import DataShard, Position
from nmt_train.corpus.guidance import Guidance
from nmt_train.corpus.mixture import Mixture
from nmt_train.corpus.store import Stores
from nmt_train.corpus.survey import refuse_left_out
from nmt_train.corpus.vocabulary import SOURCE, TARGET, UNKNOWN, Vocabulary, VocabularyPair

_CANDIDATES = 16  # segmentations of which one is sampled
_SAMPLE = 2000  # batches, of which the largest is found


class _Begun(NamedTuple):
    """An epoch that began with another distribution: its completed batches, and all of them."""

    done: int
    total: int


@dataclass(frozen=True)
class LeftOut:
    """The numbers of pairs that training leaves out, by reason."""

    empty: int
    long: int
    total: int

    def __str__(self) -> str:
        return f"{self.empty:,} with an empty side, {self.long:,} over-long, of {self.total:,} pairs"


def check_settings(corpus: CorpusConfig, vocabulary: Vocabulary) -> None:
    """Raise UserError if no batches can be made with this vocabulary, whatever the text is."""
    if corpus.vocabulary.sampling and not vocabulary.can_resample():
        raise UserError(
            "corpus.vocabulary.sampling: needs one SentencePiece model of type unigram for both sides, or separate vocabularies"
            " of that type, and this run's vocabulary is another; set it to 0"
        )
    if any(part.noise for part in corpus.parts) and isinstance(vocabulary, VocabularyPair):
        raise UserError("corpus.train: noise needs one SentencePiece model for both sides; remove it")
    for text in corpus.vocabulary.user_defined or ():
        if not vocabulary.of(SOURCE).has_piece(text):
            raise UserError(
                f"corpus.vocabulary.user_defined: {text} is no user-defined piece of this run's vocabulary; remove it, or use a"
                " vocabulary that has it"
            )


def check_batch_size(corpus: CorpusConfig, batch: BatchConfig) -> None:
    """Raise UserError if a batch cannot hold the longest sentence."""
    if batch.sentences is None and batch.tokens <= corpus.max_length:
        raise UserError(
            f"batch.tokens: {batch.tokens} cannot hold one sentence of corpus.max_length {corpus.max_length} pieces and END;"
            " raise batch.tokens or lower corpus.max_length"
        )


class _Epoch:
    """The batches of an epoch in training order: batch n has `pairs` from `starts[n]` to `starts[n + 1]`, by their numbers.

    A window is arranged when its first batch is needed. `starts` has the batches of the windows arranged so far.
    """

    def __init__(self, pairs: np.ndarray, windows: Iterator[tuple[np.ndarray, list[int]]]) -> None:
        """pairs (pairs,): in any order. windows: arranges the next window; yields its pairs, and the sizes of its batches."""
        self.pairs, self.starts, self._windows = pairs, [0], windows
        self._arranging = threading.Lock()  # several threads may read the same epoch

    def numbers(self) -> Iterator[int]:
        """Count the batches from 0."""
        counted = 0
        while counted < len(self.starts) - 1 or self._arrange(counted):
            yield from range(counted, counted := len(self.starts) - 1)

    def _arrange(self, counted: int) -> bool:
        """Arrange one more window, unless there are more than `counted` batches by now; returns whether there are."""
        with self._arranging:
            start = self.starts[-1]
            for window, sizes in itertools.islice(self._windows, len(self.starts) - 1 == counted):
                self.pairs[start : start + len(window)] = window
                self.starts += itertools.islice(itertools.accumulate(sizes, initial=start), 1, None)
            return len(self.starts) - 1 > counted

    def batch(self, number: int) -> np.ndarray:
        return self.pairs[self.starts[number] : self.starts[number + 1]]


class Batches:
    """The batches of every epoch. Batch i of epoch e is the same in every process that has the same seed.

    Raises UserError if training would leave out too many pairs, or if a batch cannot hold the longest sentence.
    """

    def __init__(self, stores: Stores, corpus: CorpusConfig, batch: BatchConfig, vocabulary: Vocabulary, seed: int) -> None:
        self.stores, self._config, self._vocabulary, self._seed = stores, batch, vocabulary, seed
        check_settings(corpus, vocabulary)
        check_batch_size(corpus, batch)
        self._label, self._longest = corpus.label, corpus.max_length
        self._window, self._sampling = corpus.window, corpus.vocabulary.sampling
        self._noise = [part.noise for part in corpus.parts]
        self._guidance = Guidance(stores, vocabulary) if stores.aligned else None
        lengths = stores.lengths()
        self._lengths = tuple(np.concatenate(side) if len(side) > 1 else side[0] for side in zip(*lengths, strict=True))
        # numpy sorts short integers in linear time.
        self._sorted_as = np.int16 if corpus.max_length < 1 << 15 else np.int32
        longest, shortest = np.maximum(*self._lengths), np.minimum(*self._lengths)
        kept = (shortest > 0) & (longest <= corpus.max_length)
        empty = int((shortest == 0).sum())
        self.left_out = LeftOut(empty, len(kept) - empty - int(kept.sum()), len(kept))
        numbers = np.flatnonzero(kept).astype(np.int32 if len(kept) < 1 << 31 else np.int64)
        ends = np.cumsum([len(source) for source, _ in lengths])
        self._kept = np.split(numbers, np.searchsorted(numbers, ends[:-1]))
        self._check(corpus, shortest, longest)
        self.mixture = Mixture(corpus, self._kept, seed)
        # Those in use: the workers of a simulated cluster, or threads, share them.
        self._making = threading.Lock()
        self._epochs = WeakValueDictionary[int, _Epoch]()

    def _check(self, corpus: CorpusConfig, shortest: np.ndarray, longest: np.ndarray) -> None:
        for number, kept in enumerate(self._kept):
            if len(kept) == 0:
                raise UserError(
                    f"{corpus.label(number)}: no pair is left to train on ({self.left_out}); check the files and"
                    " corpus.max_length"
                )
        refuse_left_out(corpus, shortest, longest, self.left_out.total)

    def __len__(self) -> int:
        """Return the number of pairs in the first epoch."""
        return sum(self.mixture.counts(0))

    def stream(self, data_shard: DataShard, position: Position) -> Iterator[Turn]:
        """Yield one worker's turns endlessly.

        The stream starts at `position`, and ignores later changes of it. There is no batch if none of the epoch is left for the
        worker or, if `data_shard` is even, if the worker has one batch fewer than others.
        """
        epoch, first = position.epochs, position.batches
        while True:
            batches = self._epoch(epoch)
            mine = itertools.islice(enumerate(data_shard.pick(epoch, batches.numbers())), first, None)
            begun, waiting = self._begun(epoch, data_shard), next(mine, None)
            if waiting is None:
                yield Turn(None, True, epoch + 1.0)
            while waiting is not None:
                (turn, (number, own, ahead)), waiting = waiting, next(mine, None)
                if begun is None:
                    trained = batches.starts[ahead] / len(batches.pairs)
                else:
                    trained = (begun.done + turn * data_shard.size) / begun.total
                batch = None if own is None else self._assemble(batches.batch(own), [self._seed, epoch, number])
                yield Turn(batch, waiting is None, epoch + trained)
            epoch, first = epoch + 1, 0

    def _begun(self, epoch: int, data_shard: DataShard) -> _Begun | None:
        """How many batches of `epoch` earlier distributions of it have completed; None if there was none."""
        if not any(position.epochs >= epoch for stage in data_shard.stages for position in stage):
            return None
        total = sum(1 for _ in self._epoch(epoch).numbers())
        left = sum(1 for _ in DataShard(0, 1, data_shard.stages).pick(epoch, iter(range(total))))
        return _Begun(total - left, total)

    def epochs(self, length: Duration | None) -> float:
        """Return a length in epochs or target tokens as a number of epochs; infinite for others."""
        if length is None or length.unit not in "et":
            return math.inf
        if length.unit == "e":
            return length.amount
        means = [float(np.mean(self._lengths[1][kept] + 1)) for kept in self._kept]
        left, epoch = length.amount, 0
        while True:
            tokens = sum(count * mean for count, mean in zip(self.mixture.counts(epoch), means, strict=True))
            if left <= tokens or epoch >= self.mixture.last_stage:  # from then on, all epochs are alike
                return epoch + left / tokens
            left, epoch = left - tokens, epoch + 1

    def largest(self) -> Batch:
        """Of the first batches of an epoch, a sample of all, the one with the most pieces, padding included."""

        def pieces(pairs: np.ndarray) -> int:
            return len(pairs) * sum(int(lengths[pairs].max()) + 1 for lengths in self._lengths)

        return self._assemble(max(itertools.islice(self.groups(0), _SAMPLE), key=pieces), [self._seed])

    def described(self, batch: Batch) -> str:
        """Which lines of which training corpora a batch consists of."""
        lines: dict[int, list[int]] = {}
        for pair in batch.pairs:
            number, line = self.stores.place(pair)
            lines.setdefault(number, []).append(line)
        found = []
        for number, its in sorted(lines.items()):
            some = ", ".join(map(str, its[:5])) + (", ..." if len(its) > 5 else "")
            found.append(f"{self._label(number)}, lines {some}")
        return "; ".join(found)

    def target_tokens(self) -> list[int]:
        """Return the number of target tokens of each batch of the first epoch. Later epochs of the same stage are similar."""
        lengths = self._lengths[1]
        return [int((lengths[pairs] + 1).sum(dtype=np.int64)) for pairs in self.groups(0)]

    def groups(self, epoch: int) -> Iterator[np.ndarray]:
        """Yield the pair numbers of each batch of `epoch` in training order; `Mixture` says which pairs these are."""
        batches = self._epoch(epoch)
        return map(batches.batch, batches.numbers())

    def _epoch(self, epoch: int) -> _Epoch:
        with self._making:
            batches = self._epochs.get(epoch)
            if batches is None:
                random = np.random.default_rng([self._seed, epoch])
                pairs = random.permutation(self.mixture.pairs(epoch))
                batches = self._epochs[epoch] = _Epoch(pairs, self._arranged(pairs, random))
            return batches

    def _arranged(self, pairs: np.ndarray, random: np.random.Generator) -> Iterator[tuple[np.ndarray, list[int]]]:
        """Arrange each window of an epoch's shuffled `pairs`; yields its pairs in training order, and its batches' sizes."""
        for first in range(0, len(pairs), self._window):
            window = pairs[first : first + self._window]
            source, target = (lengths[window].astype(self._sorted_as) for lengths in self._lengths)
            # Sort sources up and down in turn: each target length starts near the source length that ended the previous one.
            window = window[np.lexsort((np.where(target % 2, source, -source), target))]
            cuts = np.array(self._cut(self._lengths[1][window] + 1))
            order = random.permutation(len(cuts) - 1)
            sizes = np.diff(cuts)[order]
            moved = np.repeat(cuts[order] - np.cumsum(sizes) + sizes, sizes)  # how far each pair comes from behind
            yield window[np.arange(len(window)) + moved], sizes.tolist()

    def _cut(self, lengths: np.ndarray) -> list[int]:
        """Return the batch boundaries among sentences sorted by target length; `lengths` include END."""
        if self._config.sentences is not None:
            return [*range(0, len(lengths), self._config.sentences), len(lengths)]
        cuts, longest = [0], lengths.tolist()
        while (start := cuts[-1]) < len(longest):
            # The last sentence is the longest: a binary search finds the largest batch whose padded rectangle fits.
            size = min(len(longest) - start, self._config.tokens // longest[start])
            if longest[start + size - 1] > longest[start]:
                sizes = range(1, size + 1)
                size = bisect_right(sizes, self._config.tokens, key=lambda size: size * longest[start + size - 1])
            cuts.append(start + size)
        return cuts

    def _assemble(self, pairs: np.ndarray, seed: list[int]) -> Batch:
        source, target = self.stores.rows(pairs)
        random = np.random.default_rng(seed)
        if any(self._noise):
            for row, pair in enumerate(pairs):
                source[row], target[row] = self._noisy(pair, source[row], target[row], random)
        if self._sampling:
            source, target = (
                [np.array(its.resample(ids, self._sampling, _CANDIDATES, random)) for ids in rows]
                for its, rows in ((self._vocabulary.of(SOURCE), source), (self._vocabulary.of(TARGET), target))
            )
        batch = assemble(source, target, tuple(pairs.tolist()))
        if self.stores.weighted:
            batch = replace(batch, weights=torch.tensor([self.stores.weight(pair) for pair in pairs]))
        return batch if self._guidance is None else self._guidance.added(batch, source, target)

    def _noisy(
        self, pair: int, source: np.ndarray, target: np.ndarray, random: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a pair after the random changes of its corpus; its tag stays.

        Pairs with unknown pieces, whose characters are not known, stay as they are; so do those that would become too long.
        """
        number, _ = self.stores.place(pair)
        noise, tag = self._noise[number], self.stores.tags[number]
        if noise is None or (source == UNKNOWN).any() or (target == UNKNOWN).any():
            return source, target
        plain = [source[len(tag) :].tolist(), target.tolist()]
        texts = [self._vocabulary.of(side).decode([ids])[0] for side, ids in enumerate(plain)]
        changed = noise.apply(texts[0], texts[1], random)
        if list(changed) == texts:
            return source, target
        ids = [np.array(self._vocabulary.encode([text], side)[0]) for side, text in enumerate(changed)]
        if not all(len(its) and (its != UNKNOWN).all() for its in ids):
            return source, target
        noisy = np.concatenate([tag, ids[0]]), ids[1]
        return noisy if max(map(len, noisy)) <= self._longest else (source, target)
