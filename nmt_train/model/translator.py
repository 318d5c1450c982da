"""Translate text in constant memory: each window of lines is sorted by length and batched; output is in input order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import numpy as np

from nmt_train.common.errors import NotFinite
from nmt_train.corpus.batch import fitting, pad, padding_mask
from nmt_train.corpus.vocabulary import END, Vocabulary
from nmt_train.model.beam_search import Hypothesis, SearchConfig, search
from nmt_train.model.ensemble import Ensemble
from nmt_train.model.transformer import Transformer

NO_PROBABILITIES = (
    "the model gives no probabilities: its parameters are not finite, or too large; use an earlier checkpoint, or train with a"
    " lower optimizer.learning_rate or a longer optimizer.warmup"
)


class Translator:
    """A model with its vocabulary; `batch_tokens` limits the sentences of a batch times its longest source [pieces]."""

    def __init__(
        self, model: Transformer | Ensemble, vocabulary: Vocabulary, config: SearchConfig, batch_tokens: int = 2048,
        longest: int = 1000,
    ) -> None:  # fmt: skip
        """longest: sources are truncated to this number of pieces, including END.

        cut: the numbers of the truncated sources. unknown_codes: those of sources with an unknown language code. broken_off:
        those of sources whose translation did not end before its maximum length.
        """
        self.model, self.vocabulary, self.config = model, vocabulary, config
        self._batch_tokens, self._longest = batch_tokens, longest
        self.cut: list[int] = []
        self.unknown_codes: list[int] = []
        self.broken_off: list[int] = []
        self._lines = 0  # sources so far

    def stream(self, lines: Iterable[str], window: int = 2000) -> Iterator[list[tuple[str, Hypothesis]]]:
        """Yield the n-best list of (text, hypothesis) for each line, in order; read `window` lines ahead."""
        iterator = iter(lines)
        while chunk := list(islice(iterator, window)):
            self.unknown_codes += [
                self._lines + number for number, line in enumerate(chunk, 1) if self.vocabulary.unknown_code(line)
            ]
            for hypotheses in self.translate([np.array(ids) for ids in self.vocabulary.encode(chunk)]):
                texts = self.vocabulary.decode([hypothesis.ids for hypothesis in hypotheses])
                yield list(zip(texts, hypotheses, strict=True))

    def translate(self, sources: list[np.ndarray], between: Callable[[], None] = lambda: None) -> list[list[Hypothesis]]:
        """Return the n-best lists of sources (piece ids without begin or end); an empty source has one empty translation.

        Calls `between` before each batch. Raises NotFinite if the model gives no probabilities.
        """
        results: list[list[Hypothesis]] = [[Hypothesis([], 0.0, 0.0)] for _ in sources]
        device = next(self.model.parameters()).device
        was_training = self.model.training
        self.model.eval()
        try:
            for group in self._groups(sources):
                between()
                ids = pad([np.append(sources[i][: self._longest - 1], END).astype(np.int64) for i in group])
                mask = padding_mask(ids)
                found = search(self.model, ids.to(device), None if mask is None else mask.to(device), self.config)
                if not all(found):
                    raise NotFinite(NO_PROBABILITIES)
                for i, hypotheses in zip(group, found, strict=True):
                    results[i] = hypotheses
        finally:
            self.model.train(was_training)
        self.cut += [self._lines + number for number, ids in enumerate(sources, 1) if len(ids) >= self._longest]
        self.broken_off += [self._lines + number for number, best in enumerate(results, 1) if not best[0].ended]
        self._lines += len(sources)
        return results

    def _groups(self, sources: list[np.ndarray]) -> Iterator[list[int]]:
        """Yield batches of at most `batch_tokens`, as indices of the non-empty sources, longest first."""
        order = sorted((i for i in range(len(sources)) if len(sources[i])), key=lambda i: -len(sources[i]))
        start = 0
        while start < len(order):
            longest = min(len(sources[order[start]]) + 1, self._longest)
            size = fitting(longest, self._batch_tokens)
            yield order[start : start + size]
            start += size


def best_text(vocabulary: Vocabulary, hypotheses: list[list[Hypothesis]]) -> list[str]:
    """Return the detokenized best hypothesis of each sentence."""
    return vocabulary.decode([found[0].ids for found in hypotheses])
