"""Vocabularies of Marian: SentencePiece models whose pieces 0 and 1 are </s> and <unk>, without padding or begin.

Ours have padding, unknown, begin and end as pieces 0 to 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import sentencepiece

from nmt_train.common.errors import UserError, unreadable
from nmt_train.corpus.sentencepiece_model import CONTROL, entry, renumbered
from nmt_train.corpus.vocabulary import BEGIN, END, PAD, UNKNOWN, SeparateVocabularies, Vocabulary

_NEW = ("<pad>", "", "<s>", "")  # our names of pieces that Marian's vocabularies lack, by our ids


def read(paths: Sequence[Path]) -> tuple[Vocabulary, list[int], list[int]]:
    """Read one vocabulary for both sides, or the source's and the target's.

    Return ours, and for each of the ids of a side Marian's id; -1: Marian has no such piece. Raises UserError if a file is no
    vocabulary.
    """
    if len(paths) == 2 and _bytes(paths[0]) == _bytes(paths[1]):
        paths = paths[:1]
    sides, orders = [], []
    for path in paths:
        model = _bytes(path)
        order = _order(_processor(model, path))
        pieces = [entry(_NEW[place], CONTROL) if number < 0 else number for place, number in enumerate(order)]
        sides.append(Vocabulary(renumbered(model, pieces), str(path)))
        orders.append(order)
    both = sides[0] if len(sides) == 1 else SeparateVocabularies.join(sides[0], sides[1], " and ".join(map(str, paths)))
    return both, orders[0], orders[-1]


def written(vocabulary: Vocabulary) -> list[tuple[bytes, list[int]]]:
    """Return Marian's vocabulary for each side (one if both are the same), with our id for each of Marian's ids."""
    orders = [[END, UNKNOWN, *range(END + 1, len(vocabulary.of(side)))] for side in range(len(vocabulary.models))]
    return [(renumbered(model, order), order) for model, order in zip(vocabulary.models, orders, strict=True)]


def _order(processor: sentencepiece.SentencePieceProcessor) -> list[int]:
    special = {PAD: processor.pad_id(), UNKNOWN: processor.unk_id(), BEGIN: processor.bos_id(), END: processor.eos_id()}
    first = [special[place] for place in range(END + 1)]
    return first + [number for number in range(len(processor)) if number not in first]


def _bytes(path: Path) -> bytes:
    if path.suffix != ".spm":
        raise UserError(
            f"{path}: only SentencePiece vocabularies (.spm) can be read, no word lists (.yml, .txt) and no factors (.fsv); of"
            " OPUS-MT, import the Hugging Face folder instead"
        )
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{unreadable(path, error)}; give the vocabulary that the model was trained with") from None


def _processor(model: bytes, path: Path) -> sentencepiece.SentencePieceProcessor:
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    except (RuntimeError, ValueError):
        raise UserError(f"{path}: not a SentencePiece model; give the vocabulary that the model was trained with") from None
    if processor.eos_id() < 0:
        raise UserError(f"{path}: has no piece for the end of a sentence; give the vocabulary that the model was trained with")
    return processor
