"""Alignments of the words or pieces of translations by the guided attention head, as soft and hard alignments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from nmt_train.corpus.batch import assemble, fitting
from nmt_train.corpus.vocabulary import SOURCE, TARGET, Vocabulary
from nmt_train.corpus.whole_words import WholeWords
from nmt_train.model.ensemble import Ensemble
from nmt_train.model.transformer import Transformer

Links = list[tuple[int, int]]  # numbers from 0 of a whole word of the source, and of the target


class Sentence(NamedTuple):
    """A line of text, and its pieces without begin or end."""

    text: str
    ids: np.ndarray


class Aligner:
    """Aligns pairs of sentences by the guided head of a model, or by the mean of several models.

    A *whole word* is what whitespace separates in a line.
    """

    def __init__(
        self, model: Transformer | Ensemble, vocabulary: Vocabulary, batch_tokens: int = 2048, pieces: bool = False
    ) -> None:
        """batch_tokens: limits the sentences of a batch times its longest side [pieces]. pieces: align these, not words."""
        self._model, self._batch_tokens = model, batch_tokens
        self._words = None if pieces else WholeWords(vocabulary)

    @torch.inference_mode()
    def soft(self, sources: Sequence[Sentence], targets: Sequence[Sentence]) -> list[np.ndarray]:
        """Return the soft alignment of each pair: (target words + 1, source words + 1), fp32; the last ones are END.

        A row is how much a word of the target attends to each word of the source: the sum over the pieces of the latter, and
        the mean over its own. If pieces are aligned, they take the place of words.
        """
        alignments: dict[int, np.ndarray] = {}
        device = next(self._model.parameters()).device
        for group in self._groups(sources, targets):
            batch = assemble([sources[pair].ids for pair in group], [targets[pair].ids for pair in group]).to(device)
            for pair, weights in zip(group, self._model.guided_attention(batch).cpu().numpy(), strict=True):
                from_source, from_target = self._sums(sources[pair], SOURCE), self._sums(targets[pair], TARGET)
                own = weights[: from_target.shape[1], : from_source.shape[1]]
                means = from_target / np.maximum(1.0, from_target.sum(1, keepdims=True))
                alignments[pair] = (means @ own @ from_source.T).astype(np.float32)
        return [alignments[pair] for pair in range(len(sources))]

    def _groups(self, sources: Sequence[Sentence], targets: Sequence[Sentence]) -> Iterator[list[int]]:
        """Yield batches, as numbers of pairs of similar length."""
        lengths = [1 + max(len(source.ids), len(target.ids)) for source, target in zip(sources, targets, strict=True)]
        order = sorted(range(len(lengths)), key=lambda pair: -lengths[pair])
        while order:
            size = fitting(lengths[order[0]], self._batch_tokens)
            yield order[:size]
            order = order[size:]

    def _sums(self, sentence: Sentence, side: int) -> np.ndarray:
        """The matrix (words + 1, pieces + 1) that adds up pieces to what is aligned, and leaves END alone."""
        if self._words is None:
            return np.eye(len(sentence.ids) + 1, dtype=np.float32)
        words = self._words.of_line(sentence.text, sentence.ids, side)
        sums = np.zeros((len(sentence.text.split()) + 1, len(words) + 1), np.float32)
        pieces = np.flatnonzero(words >= 0)
        sums[words[pieces], pieces] = sums[-1, -1] = 1
        return sums


def hard(soft: np.ndarray) -> Links:
    """Link each target word with the source word to which it attends most; in the order of the source."""
    weights = soft[:-1, :-1]
    return sorted((int(source), target) for target, source in enumerate(weights.argmax(1))) if weights.size else []


def as_text(soft: np.ndarray | None, kind: str) -> str:
    """Return a soft alignment as Marian prints it. kind: hard, or soft: a list of weights for each target word and END."""
    assert soft is not None
    if kind == "hard":
        return " ".join(f"{source}-{target}" for source, target in hard(soft))
    return " ".join(",".join(f"{weight:.6g}" for weight in row) for row in soft.tolist())
