"""What can be told about parallel text without training: empty, copied and repeated pairs, and the scripts of both sides."""

from __future__ import annotations

import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np

from nmt_train.corpus.survey import Sample

SAMPLE = 10_000  # random pairs of each corpus that are kept for everything that is not counted in all pairs
_MOST = 5_000_000  # pairs whose digests are kept; of larger corpora, those of a random part of the texts
_FEWEST_LETTERS = 4  # that say which script a line is in
# Characters whose names begin otherwise than those of their script.
_SCRIPTS = {"CJK": "Han", "IDEOGRAPHIC": "Han", "FULLWIDTH": "Latin", "HALFWIDTH": "Katakana"}
_NO_SCRIPTS = ("MODIFIER", "FEMININE", "MASCULINE", "MATHEMATICAL", "MICRO", "SCRIPT", "DOUBLE-STRUCK")
# Scripts that one language mixes in a sentence.
_TOGETHER = {"Hiragana": "Han", "Katakana": "Han", "Hangul": "Han"}


class Digests:
    """The digests of texts, in bounded memory, to find out how many of them occur more than once."""

    def __init__(self, most: int = _MOST) -> None:
        self._most, self._mask, self._kept = most, 0, array("q")

    def add(self, digest: int) -> None:
        if digest & self._mask:
            return
        self._kept.append(digest)
        if len(self._kept) > self._most:  # keep those of every second text: equal texts are kept or dropped together
            self._mask = 2 * self._mask + 1
            self._kept = array("q", (kept for kept in self._kept if not kept & self._mask))

    @property
    def repeated(self) -> float:
        """The share of texts that have occurred before."""
        kept = np.sort(np.frombuffer(self._kept, np.int64)) if self._kept else np.zeros(1, np.int64)
        return int((kept[1:] == kept[:-1]).sum()) / len(kept)


class Inspection:
    """What a pass over a corpus has found. `sample` has random pairs; the numbers are of all pairs.

    heldout: the digests of pairs that training should not see. leaked: those of them that the corpus has.
    """

    def __init__(self, heldout: frozenset[int] = frozenset()) -> None:
        self.pairs = self.empty = self.copies = 0
        self.leaked: set[int] = set()
        self._heldout, self._digests, self._sample = heldout, Digests(), Sample[tuple[str, str]](SAMPLE, float("inf"))

    def add(self, pair: tuple[str, str]) -> None:
        source, target = pair
        self.pairs += 1
        self._sample.add(pair, 0)
        if not (source and target) or source.isspace() or target.isspace():
            self.empty += 1
            return
        if source == target:
            self.copies += 1
        digest = hash(pair)
        self._digests.add(digest)
        if digest in self._heldout:
            self.leaked.add(digest)

    @property
    def sample(self) -> list[tuple[str, str]]:
        return self._sample.items

    @property
    def repeated(self) -> float:
        """The share of pairs, empty ones left out, that have occurred before."""
        return self._digests.repeated


@cache
def script(letter: str) -> str:
    """The script of a letter, such as Latin or Han, by its Unicode name; an empty string if that does not say it."""
    first = unicodedata.name(letter, "").partition(" ")[0]
    return "" if first in _NO_SCRIPTS else _SCRIPTS.get(first, first.capitalize())


def scripts(lines: Iterable[str]) -> dict[str, float]:
    """The share of each script among the letters of lines, the largest first."""
    found = Counter[str]()
    for letter, count in Counter("".join(lines)).items():
        if letter.isalpha() and (its := script(letter)):
            found[its] += count
    return {name: count / found.total() for name, count in found.most_common()}


def in_other_script(lines: Sequence[str], usual: str) -> float:
    """The share of lines most of whose letters are in another script than `usual`, among those with enough letters."""
    judged = other = 0
    wanted = _TOGETHER.get(usual, usual)
    for line in lines:
        found = Counter[str]()
        for letter, count in Counter(line).items():
            if letter.isalpha() and (its := script(letter)):
                found[_TOGETHER.get(its, its)] += count
        if found.total() >= _FEWEST_LETTERS:
            judged += 1
            other += found.most_common(1)[0][0] != wanted
    return other / max(1, judged)
