"""Translate text in constant memory: each window of lines is sorted by length and batched; output is in input order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import TypeVar

import numpy as np
from torch import Tensor

from nmt_train.common.errors import NotFinite
from nmt_train.corpus import untagged
from nmt_train.corpus.batch import fitting, pad, padding_mask
from nmt_train.corpus.text import clean
from nmt_train.corpus.vocabulary import TARGET, UNKNOWN, Vocabulary
from nmt_train.model.beam_search import Hypothesis, SearchConfig, search
from nmt_train.model.demand import NOTHING, Demand, Demands, PieceKinds
from nmt_train.model.ensemble import Ensemble
from nmt_train.model.request import Request
from nmt_train.model.sampling import Sampling, sample
from nmt_train.model.transformer import Transformer
from nmt_train.model.word_alignment import Aligner, Sentence

Item = TypeVar("Item")
NBest = list[tuple[str, Hypothesis]]  # the translations of a line as texts, best first

NO_PROBABILITIES = (
    "the model gives no probabilities: its parameters are not finite, or too large; use an earlier checkpoint, or train with a"
    " lower optimizer.learning_rate or a longer optimizer.warmup"
)


class Translator:
    """A model with its vocabulary; `batch_tokens` limits the sentences of a batch times its longest source [pieces]."""

    def __init__(
        self, model: Transformer | Ensemble, vocabulary: Vocabulary, config: SearchConfig, batch_tokens: int = 2048,
        longest: int = 1000, tags: tuple[str, ...] = (), sampling: Sampling | None = None, copy_unknown: bool = False,
        align: bool = False, pieces: bool = False,
    ) -> None:  # fmt: skip
        """longest: sources are truncated to this number of pieces, including END. tags: each source should begin with one.
        sampling: draw translations at random instead of searching for the best. copy_unknown: a translation may have unknown
        pieces, and its n-th one becomes the characters of the n-th unknown piece of the source. align: align translations in
        `stream`, for which the models need guided heads. pieces: texts are pieces, separated by spaces; these are aligned.

        cut: the numbers of the truncated sources. unknown_codes: those of sources with an unknown language code. untagged:
        those of sources without a tag. broken_off: those of sources whose translation did not end before its maximum length.
        lacking: those of sources whose translation lacks a term.
        """
        self.model, self.vocabulary, self.config = model, vocabulary, config
        self._batch_tokens, self._longest = batch_tokens, longest
        self.cut: list[int] = []
        self.unknown_codes: list[int] = []
        self.untagged: list[int] = []
        self._tags = tags
        self._aligner = Aligner(model, vocabulary, batch_tokens, pieces) if align else None
        self._pieces = pieces
        self.broken_off: list[int] = []
        self.lacking: list[int] = []
        self._sampling, self._copies = sampling, copy_unknown
        self._lines = 0  # sources so far

    def stream(self, lines: Iterable[str | Request], window: int = 2000, pause: float | None = None) -> Iterator[NBest]:
        """Yield the n-best list of (text, hypothesis) for each line, in order, without repeated texts; read at most `window`
        lines ahead.

        pause: translate what has been read when no line has come for this time [seconds]; None: wait for the whole window.
        """
        for chunk in _windows(lines, window) if pause is None else _until_pauses(lines, window, pause):
            requests = [line if isinstance(line, Request) else Request(line) for line in chunk]
            texts = [request.text for request in requests]
            self.unknown_codes += [
                self._lines + number for number, text in enumerate(texts, 1) if self.vocabulary.unknown_code(text)
            ]
            self.untagged += [self._lines + number for number in untagged(texts, self._tags)]
            encoded = self.vocabulary.encode(texts)
            copied = [self._unknown(text, ids) for text, ids in zip(texts, encoded, strict=True)]
            demands = [replace(each.demand, unknown=len(its)) for each, its in zip(requests, copied, strict=True)]
            sources = [np.array(ids, np.int64) for ids in encoded]
            found = self.translate(sources, demands=demands)
            lists = [_different(self._decode(*each), each[2]) for each in zip(requests, copied, found, strict=True)]
            if self._aligner is not None:
                lists = self._aligned(self._aligner, [*map(Sentence, texts, sources)], lists)
            yield from lists

    def _aligned(self, aligner: Aligner, sources: list[Sentence], lists: list[NBest]) -> list[NBest]:
        """The n-best list of each source with alignments."""
        left, right = [], []
        for source, found in zip(sources, lists, strict=True):
            left += [Sentence(source.text, source.ids[: self._longest - 1])] * len(found)
            right += [Sentence(text, np.array(hypothesis.ids, np.int64)) for text, hypothesis in found]
        soft = iter(aligner.soft(left, right))
        return [[(text, replace(hypothesis, alignment=next(soft))) for text, hypothesis in found] for found in lists]

    def _unknown(self, text: str, ids: list[int]) -> list[str]:
        """What the unknown pieces of a source stand for, if they are copied."""
        return self.vocabulary.unknown([text])[0] if self._copies and UNKNOWN in ids else []

    def _decode(self, request: Request, copied: list[str], hypotheses: list[Hypothesis]) -> list[str]:
        """The texts of hypotheses: the prefix as it was given, then what follows it."""
        prefix = request.demand.prefix
        unknown = [*(self.vocabulary.unknown([request.prefix], TARGET)[0] if prefix else ()), *copied]
        if self._pieces:
            return [clean(" ".join(self.vocabulary.pieces_of(hypothesis.ids, unknown))) for hypothesis in hypotheses]
        if not (prefix or copied):
            return self.vocabulary.decode([hypothesis.ids for hypothesis in hypotheses])
        begin = self.vocabulary.decode_with(prefix, unknown)
        texts = [self.vocabulary.decode_with(hypothesis.ids, unknown) for hypothesis in hypotheses]
        return [request.prefix + text.removeprefix(begin) if text else "" for text in texts]

    def translate(
        self, sources: list[np.ndarray], between: Callable[[], None] = lambda: None, demands: Sequence[Demand] | None = None
    ) -> list[list[Hypothesis]]:
        """Return the n-best lists of sources (piece ids without begin or end); an empty source has one empty translation.

        demands: what each translation must have, except that of an empty source.

        Calls `between` before each batch. Raises NotFinite if the model gives no probabilities.
        """
        results: list[list[Hypothesis]] = [[Hypothesis([], 0.0, 0.0)] for _ in sources]
        device = next(self.model.parameters()).device
        was_training = self.model.training
        self.model.eval()
        try:
            for group in self._groups(sources):
                between()
                ids = pad([sources[i][: self._longest - 1] for i in group])
                mask = padding_mask(ids)
                demanded = None if demands is None else [demands[i] for i in group]
                found = self._search(ids.to(device), None if mask is None else mask.to(device), group, demanded)
                if not all(found):
                    raise NotFinite(NO_PROBABILITIES)
                for i, hypotheses in zip(group, found, strict=True):
                    results[i] = hypotheses
        finally:
            self.model.train(was_training)
        for number, (best, demand) in enumerate(zip(results, demands or (), strict=False), 1):
            if demand.terms and not demand.has_terms(best[0].ids, self._kinds):
                self.lacking.append(self._lines + number)
        self.cut += [self._lines + number for number, ids in enumerate(sources, 1) if len(ids) >= self._longest]
        self.broken_off += [self._lines + number for number, best in enumerate(results, 1) if not best[0].ended]
        self._lines += len(sources)
        return results

    def _search(
        self, source: Tensor, mask: Tensor | None, group: list[int], demanded: list[Demand] | None
    ) -> list[list[Hypothesis]]:
        """Translate a batch. group: the numbers of its sources in the window."""
        demands = None
        if demanded is not None and any(demand != NOTHING for demand in demanded):
            demands = Demands(demanded, self._kinds)
        if self._sampling is None:
            return search(self.model, source, mask, self.config, demands)
        numbers = [self._lines + i for i in group]
        return sample(self.model, source, mask, self.config, self._sampling, numbers, demands)

    @cached_property
    def _kinds(self) -> PieceKinds:
        return PieceKinds.of(self.vocabulary, next(self.model.parameters()).device)

    def _groups(self, sources: list[np.ndarray]) -> Iterator[list[int]]:
        """Yield batches of at most `batch_tokens`, as indices of the non-empty sources, longest first."""
        order = sorted((i for i in range(len(sources)) if len(sources[i])), key=lambda i: -len(sources[i]))
        start = 0
        while start < len(order):
            longest = min(len(sources[order[start]]) + 1, self._longest)
            size = fitting(longest, self._batch_tokens)
            yield order[start : start + size]
            start += size


def _different(texts: list[str], hypotheses: list[Hypothesis]) -> NBest:
    """The hypotheses with their texts, but for those whose text a better one has."""
    found: dict[str, Hypothesis] = {}
    for text, hypothesis in zip(texts, hypotheses, strict=True):
        found.setdefault(text, hypothesis)
    return list(found.items())


def _windows(lines: Iterable[Item], size: int) -> Iterator[list[Item]]:
    iterator = iter(lines)
    while window := list(islice(iterator, size)):
        yield window


def _until_pauses(lines: Iterable[Item], size: int, pause: float) -> Iterator[list[Item]]:
    """Yield lists of at most `size` lines, each as soon as no line has come for `pause` seconds."""
    read: queue.Queue[Item | None] = queue.Queue(size)
    errors: list[BaseException] = []

    def put() -> None:
        try:
            for line in lines:
                read.put(line)
        except BaseException as error:
            errors.append(error)
        read.put(None)

    threading.Thread(target=put, name="input", daemon=True).start()
    while (line := read.get()) is not None:
        window = [line]
        try:
            while line is not None and len(window) < size:
                line = read.get(timeout=pause)
                window += [] if line is None else [line]
        except queue.Empty:
            pass
        yield window
        if line is None:
            break
    if errors:
        raise errors[0]


def best_text(vocabulary: Vocabulary, hypotheses: list[list[Hypothesis]]) -> list[str]:
    """Return the detokenized best hypothesis of each sentence."""
    return vocabulary.decode([found[0].ids for found in hypotheses])
