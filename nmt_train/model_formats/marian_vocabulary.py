"""Vocabularies of Marian: SentencePiece models whose pieces 0 and 1 are </s> and <unk>, without padding or begin.

Ours have padding, unknown, begin and end as pieces 0 to 3. A SentencePiece model is a protocol buffer in which each piece is an
entry of field 1, and the id of a piece is its place (sentencepiece_model.proto). So pieces are renumbered by moving entries;
everything else stays the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import sentencepiece

from nmt_train.common.errors import UserError, unreadable
from nmt_train.corpus.vocabulary import BEGIN, END, PAD, UNKNOWN, Vocabulary, VocabularyPair

_PIECE = 0x0A  # the key of field 1, whose type is 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # the types of fields
_CONTROL = b"\x15\0\0\0\0\x18\x03"  # the end of a piece's entry: score 0, type control
_NEW = ("<pad>", "", "<s>", "")  # our names of pieces that Marian's vocabularies lack, by our ids


def read(paths: Sequence[Path]) -> tuple[Vocabulary, list[int], list[int]]:
    """Read one vocabulary for both sides, or the source's and the target's.

    Return ours, and for each of its ids Marian's id on the source side and on the target side; -1: Marian has no such piece. In
    a pair, a piece that only the other side has is unknown to this side. Raises UserError if a file is not a vocabulary.
    """
    models = [_bytes(path) for path in paths]
    processors = [_processor(model, path) for model, path in zip(models, paths, strict=True)]
    if len({*models}) == 1:
        order = _order(processors[0])
        pieces = [_NEW[place] if number < 0 else number for place, number in enumerate(order)]
        return Vocabulary(renumbered(models[0], pieces), str(paths[0])), order, order
    source, target = processors
    names = dict.fromkeys(processor.id_to_piece(i) for processor in (target, source) for i in _ordinary(processor))
    special = ("<pad>", target.id_to_piece(target.unk_id()), "<s>", target.id_to_piece(target.eos_id()))
    if clash := names.keys() & {*special}:
        raise UserError(
            f"{paths[0]}: {min(clash)} is an ordinary piece here, but not in Marian; give the model's own vocabularies"
        )
    pair = VocabularyPair.join(models[0], models[1], [*special, *names], str(paths[0]))
    orders = [[-1, processor.unk_id(), -1, processor.eos_id(), *map(processor.piece_to_id, names)] for processor in processors]
    return pair, orders[0], orders[1]


def written(vocabulary: Vocabulary) -> list[tuple[bytes, list[int]]]:
    """Return Marian's vocabulary for each side (one if both are the same), with our id for each of Marian's ids."""
    if not isinstance(vocabulary, VocabularyPair):
        order = [END, UNKNOWN, *range(END + 1, len(vocabulary))]
        return [(renumbered(vocabulary.model, order), order)]
    ids = {name: number for number, name in enumerate(vocabulary.pieces)}
    sides = []
    for processor in vocabulary.sides:
        special = {processor.unk_id(): UNKNOWN, processor.eos_id(): END}
        order = [special[i] if i in special else ids[processor.id_to_piece(i)] for i in range(len(processor))]
        sides.append((processor.serialized_model_proto(), order))
    return sides


def renumbered(model: bytes, order: Sequence[int | str]) -> bytes:
    """Return the SentencePiece model with the pieces of these ids, in this order; a name makes a new control piece."""
    pieces, rest = _entries(model)
    chosen = [pieces[piece] if isinstance(piece, int) else _control(piece.encode()) for piece in order]
    return b"".join(chosen + rest)


def _order(processor: sentencepiece.SentencePieceProcessor) -> list[int]:
    special = {PAD: processor.pad_id(), UNKNOWN: processor.unk_id(), BEGIN: processor.bos_id(), END: processor.eos_id()}
    first = [special[place] for place in range(END + 1)]
    return first + [number for number in range(len(processor)) if number not in first]


def _ordinary(processor: sentencepiece.SentencePieceProcessor) -> list[int]:
    return [number for number in range(len(processor)) if number not in (processor.unk_id(), processor.eos_id())]


def _entries(model: bytes) -> tuple[list[bytes], list[bytes]]:
    """Split a serialized SentencePiece model into the entries of its pieces, and all others."""
    pieces, rest, end = list[bytes](), list[bytes](), 0
    while end < len(model):
        start, (key, end) = end, _varint(model, end)
        kind = key & 7
        if kind == _BYTES:
            size, end = _varint(model, end)
            end += size
        elif kind == _VARINT:
            _, end = _varint(model, end)
        else:
            end += {_FIXED64: 8, _FIXED32: 4}[kind]
        (pieces if key == _PIECE else rest).append(model[start:end])
    return pieces, rest


def _varint(data: bytes, start: int) -> tuple[int, int]:
    """The number of variable length at `start`, and the place behind it."""
    value = shift = 0
    while True:
        value |= (data[start] & 0x7F) << shift
        start, shift = start + 1, shift + 7
        if data[start - 1] < 0x80:
            return value, start


def _control(name: bytes) -> bytes:
    entry = bytes([_PIECE, len(name)]) + name + _CONTROL
    return bytes([_PIECE, len(entry)]) + entry


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
