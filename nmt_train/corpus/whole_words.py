"""Which whole word of a sentence each piece belongs to; a whole word is what whitespace separates in a line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np

from nmt_train.corpus import MAX_RATIO, CorpusPart
from nmt_train.corpus.alignment import read_aligned
from nmt_train.corpus.vocabulary import END, SOURCE, SPACE, TARGET, UNKNOWN, Vocabulary


class WholeWords:
    """Finds the whole words of sentences that have been divided by this vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._begins = [_begins(vocabulary.of(side)) for side in (SOURCE, TARGET)]

    def of_ids(self, ids: np.ndarray, side: int) -> np.ndarray:
        """The number, from 0, of the whole word of each piece (pieces,), by the pieces that begin one.

        side: SOURCE or TARGET.
        """
        begins = self._begins[side][ids]
        begins[:1] = True
        numbers: np.ndarray = np.cumsum(begins) - 1
        return numbers

    def of_line(self, line: str, ids: np.ndarray, side: int) -> np.ndarray:
        """The same for the pieces of a line, or the first of them; all -1 if they are not found in its words.

        It differs from `of_ids` where SentencePiece sees other words than whitespace separates (characters that it leaves out
        or divides), and where an unknown piece begins a word.
        """
        numbers, words = self.of_ids(ids, side), line.split()
        if len(words) == (numbers[-1] + 1 if len(ids) else 0):
            return numbers
        apart = [(piece, number) for number, its in enumerate(self._vocabulary.encode(words, side)) for piece in its]
        # SentencePiece makes one unknown piece of several that are neighbors; it counts as a piece of the first word.
        joined = [its for before, its in pairwise([(END, -1), *apart]) if (before[0], its[0]) != (UNKNOWN, UNKNOWN)]
        if [piece for piece, _ in joined[: len(ids)]] == ids.tolist():
            return np.array([number for _, number in joined[: len(ids)]], np.int64)
        return np.full(len(ids), -1)

    def renumbered(self, links: np.ndarray, side: int, line: str, ids: np.ndarray) -> np.ndarray:
        """Links (links, 2) with numbers as in `of_ids` instead of those of `line` on one side, SOURCE or TARGET."""
        numbers, words = self.of_ids(ids, side), self.of_line(line, ids, side)
        if np.array_equal(numbers, words):
            return links
        numbers_of: dict[int, list[int]] = {}
        for word, number in sorted({*zip(words.tolist(), numbers.tolist(), strict=True)}):
            numbers_of.setdefault(word, []).append(number)
        changed = [
            (number, link[TARGET]) if side == SOURCE else (link[SOURCE], number)
            for link in links.tolist()
            for number in numbers_of.get(link[side], ())
        ]
        return np.array(changed, np.int64).reshape(-1, 2)


def _begins(vocabulary: Vocabulary) -> np.ndarray:
    """Whether each piece begins a whole word; bool (pieces,)."""
    begins = np.array([vocabulary.piece(number).startswith(SPACE) for number in range(len(vocabulary))])
    begins[UNKNOWN] = begins[END + 1 :].all()  # if all pieces are words, the unknown one, too
    return begins


def links_of_ids(
    part: CorpusPart, key: str, vocabulary: Vocabulary, ids: Iterable[tuple[np.ndarray, np.ndarray]], ratio: float = MAX_RATIO
) -> Iterator[np.ndarray]:
    """Yield the links of each pair (links, 2) with numbers as in `WholeWords.of_ids`, which any segmentation of a text shares.

    ids: the pieces of each pair. Other arguments and errors as for `read_aligned`.
    """
    words = WholeWords(vocabulary)
    for (source, target, links), (of_source, of_target) in zip(read_aligned(part, key, ratio), ids, strict=True):
        yield words.renumbered(words.renumbered(links, SOURCE, source, of_source), TARGET, target, of_target)
