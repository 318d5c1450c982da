"""SentencePiece models are protocol buffers in which each piece is an entry of field 1 (sentencepiece_model.proto).

The id of a piece is the place of its entry. So pieces are added by appending entries, and renumbered by moving them; everything
else stays the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # types of pieces; control ones have no text, unused ones are never encoded
_PIECE, _TRAINER = 0x0A, 0x12  # the keys of fields 1 and 2, whose type is 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # the types of fields
_SCORE_0 = b"\x15\x00\x00\x00\x00"  # field 2 of a piece, a float
_TYPE = 0x18  # the key of field 3 of a piece
_SPECIAL = (48, 45, 46, 47)  # the fields of the trainer's settings that name the pieces PAD, UNKNOWN, BEGIN and END


def entry(piece: str, kind: int) -> bytes:
    """A new piece with score 0. kind: its type."""
    return _field(bytes([_PIECE]), _field(bytes([_PIECE]), piece.encode()) + _SCORE_0 + bytes([_TYPE, kind]))


def appended(model: bytes, pieces: Sequence[str]) -> bytes:
    """The SentencePiece model with further pieces, which are user-defined."""
    return b"".join([model, *(entry(piece, USER_DEFINED) for piece in pieces)])


def renumbered(model: bytes, order: Sequence[int | bytes], special: Sequence[str] = (), unused: Sequence[int] = ()) -> bytes:
    """The SentencePiece model with the pieces of these ids, and new ones (of `entry`), in this order.

    special: the names of the pieces PAD, UNKNOWN, BEGIN and END; if it is empty, they keep their names. unused: the ids of
    pieces that follow as unused ones: SentencePiece splits them into others again.
    """
    pieces, rest = _entries(model)
    if special:  # fields that occur again replace the first ones
        names = (_field(_varint(field << 3 | _BYTES), name.encode()) for field, name in zip(_SPECIAL, special, strict=True))
        rest = [*rest, _field(bytes([_TRAINER]), b"".join(names))]
    found = [pieces[piece] if isinstance(piece, int) else piece for piece in order]
    return b"".join([*found, *(_unused(pieces[piece]) for piece in unused), *rest])


def _unused(piece: bytes) -> bytes:
    """The entry of a piece with another type; a field that occurs again replaces the first one."""
    _, start = _read_varint(piece, 1)
    return _field(piece[:1], piece[start:] + bytes([_TYPE, UNUSED]))


def _entries(model: bytes) -> tuple[list[bytes], list[bytes]]:
    """Split a serialized SentencePiece model into the entries of its pieces, and all others."""
    pieces, rest, end = list[bytes](), list[bytes](), 0
    while end < len(model):
        start, (key, end) = end, _read_varint(model, end)
        kind = key & 7
        if kind == _BYTES:
            size, end = _read_varint(model, end)
            end += size
        elif kind == _VARINT:
            _, end = _read_varint(model, end)
        else:
            end += {_FIXED64: 8, _FIXED32: 4}[kind]
        (pieces if key == _PIECE else rest).append(model[start:end])
    return pieces, rest


def _read_varint(data: bytes, start: int) -> tuple[int, int]:
    """The number of variable length at `start`, and the place behind it."""
    value = shift = 0
    while True:
        value |= (data[start] & 0x7F) << shift
        start, shift = start + 1, shift + 7
        if data[start - 1] < 0x80:
            return value, start


def _field(key: bytes, content: bytes) -> bytes:
    return key + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    """The number as a protocol buffer writes lengths: 7 bits per byte, the lowest first."""
    found = b""
    while number > 127:
        found, number = found + bytes([number & 127 | 128]), number >> 7
    return found + bytes([number])
