"""Counts the characters of a corpus that the vocabulary lacks, which become unknown pieces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from nmt_train.common.plural import counted
from nmt_train.corpus.vocabulary import UNKNOWN, Vocabulary, VocabularyPair

_KEPT = 1000  # characters in the facts of a store
_NAMED = 20  # in the log


class UnknownCharacters:
    """lines: how many lines have an unknown piece. characters: in how many lines each unknown character is.

    A vocabulary that maps the pieces of SentencePiece to ids of its own may lack pieces, which are then counted instead.
    """

    def __init__(self, facts: Mapping[str, Any] | None = None) -> None:
        """facts: as `facts` returns them."""
        self.lines = int((facts or {}).get("lines", 0))
        self.characters = Counter[str]({str(name): int(count) for name, count in (facts or {}).get("characters", {}).items()})

    def add(self, lines: Sequence[str], ids: Sequence[Sequence[int]], vocabulary: Vocabulary, side: int) -> None:
        """Count the lines of a side that have these ids."""
        affected = [line for line, its in zip(lines, ids, strict=True) if UNKNOWN in its]
        self.lines += len(affected)
        for pieces in vocabulary.unknown(affected, side) if affected else ():
            self.characters.update(set(pieces) if isinstance(vocabulary, VocabularyPair) else set("".join(pieces)))

    def merge(self, other: UnknownCharacters) -> None:
        self.lines += other.lines
        self.characters += other.characters

    @property
    def facts(self) -> dict[str, Any]:
        """The counts as JSON, of the most frequent characters."""
        return {"lines": self.lines, "characters": dict(self.characters.most_common(_KEPT))}

    def described(self) -> str:
        """A sentence for the log; an empty string if every character is known."""
        if not self.lines:
            return ""
        shown = [
            f"{name if name.isprintable() else ascii(name)} ({count:,})" for name, count in self.characters.most_common(_NAMED)
        ]
        more = len(self.characters) - len(shown)
        others = f", and {more:,} other{'s' * (more > 1)}" if more else ""
        return (
            f"{counted(self.lines, 'line')} of the training corpora {'has' if self.lines == 1 else 'have'} characters that the"
            f" vocabulary lacks (with the number of lines): {', '.join(shown)}{others}; a run with a larger"
            " corpus.vocabulary.character_coverage knows more of them"
        )
