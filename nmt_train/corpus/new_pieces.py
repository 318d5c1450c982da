"""Pieces that a vocabulary gains when a model is fine-tuned, and the old pieces that they consist of."""

from __future__ import annotations

from collections.abc import Sequence

from nmt_train.corpus.sentencepiece_model import appended
from nmt_train.corpus.vocabulary import (
    END,
    SOURCE,
    SPACE,
    TARGET,
    UNKNOWN,
    SeparateVocabularies,
    Vocabulary,
    VocabularyPair,
    code_of,
)  # fmt: skip

_WHERE = "the vocabulary with new pieces"


def extended(vocabulary: Vocabulary, pieces: Sequence[str]) -> Vocabulary:
    """The vocabulary with those of the pieces that it lacks, after its own; they are never split, wherever they occur."""
    if isinstance(vocabulary, SeparateVocabularies):
        source, target = (extended(vocabulary.of(side), pieces) for side in (SOURCE, TARGET))
        return SeparateVocabularies.join(source, target, _WHERE)
    known = {vocabulary.piece(number) for number in range(len(vocabulary))}
    new = [piece for piece in dict.fromkeys(pieces) if piece not in known and not vocabulary.has_piece(piece)]
    if not new:
        return vocabulary
    if isinstance(vocabulary, VocabularyPair):
        text = [piece for piece in new if code_of(piece) != piece]  # SentencePiece does not see codes
        models = [appended(model, text) for model in vocabulary.models]
        return VocabularyPair.join(models[SOURCE], models[TARGET], [*vocabulary.pieces, *new], _WHERE)
    found = Vocabulary(appended(vocabulary.model, new), _WHERE)
    if any(UNKNOWN in ids for ids in found.encode(new)):  # a piece there is a whole word, with the space before it
        found = Vocabulary(appended(vocabulary.model, [SPACE + piece for piece in new]), _WHERE)
    return found


def extends(new: Vocabulary, old: Vocabulary) -> bool:
    """Whether the first pieces of `new`, on both sides, are those of `old`."""
    return type(new) is type(old) and all(_begins(new.of(side), old.of(side)) for side in (SOURCE, TARGET))


def _begins(new: Vocabulary, old: Vocabulary) -> bool:
    return len(new) >= len(old) and all(new.piece(number) == old.piece(number) for number in range(len(old)))


def parts_of_new(new: Vocabulary, old: Vocabulary, side: int) -> list[list[int]]:
    """For each piece of a side that `new` has and `old` lacks, the ids of the old pieces that its text consists of.

    If these are unknown, all pieces of text.
    """
    its, before = new.of(side), old.of(side)
    added = [its.piece(number) for number in range(len(before), len(its))]
    found = []
    for piece, ids in zip(added, before.encode([piece.replace(SPACE, " ").strip() for piece in added], side), strict=True):
        inside = not piece.startswith(SPACE) and len(ids) > 1 and before.piece(ids[0]) == SPACE
        known = [number for number in ids[inside:] if number != UNKNOWN]
        found.append(known or list(range(END + 1, len(before))))
    return found
