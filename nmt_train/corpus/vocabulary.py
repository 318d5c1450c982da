"""The vocabulary: one SentencePiece model for both languages, or one for each."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import sentencepiece

from nmt_train.common.errors import UserError, unreadable
from nmt_train.common.paths import expanded
from nmt_train.corpus.text import clean

PAD, UNKNOWN, BEGIN, END = 0, 1, 2, 3
LANGUAGE = END + 1  # in a model whose `languages` is true: the piece of the source language; BEGIN is that of the target
SPACE = "\u2581"  # what SentencePiece writes for the space before a word
SOURCE, TARGET = 0, 1  # the sides of a pair
_PAIR = b"nmt_train: two SentencePiece models\n"  # the first line of a serialized `VocabularyPair`
_SEPARATE = b"nmt_train: two separate vocabularies\n"  # the first line of a serialized `SeparateVocabularies`


class Vocabulary:
    """Converts text to piece ids and back. Ids 0 to 3 are padding, unknown, begin and end of sentence."""

    threads = os.cpu_count() or 1  # that encode several lines

    def __init__(self, model: bytes, where: str) -> None:
        """`model`: a serialized SentencePiece model; `where` names it in errors."""
        self.model = model
        self._processor = _processor(model, where)
        ids = self._processor.pad_id(), self._processor.unk_id(), self._processor.bos_id(), self._processor.eos_id()
        if ids != (PAD, UNKNOWN, BEGIN, END):
            raise UserError(
                f"{where}: the padding, unknown, begin and end pieces have ids {ids}, not (0, 1, 2, 3); train the model"
                " with --pad_id=0 --unk_id=1 --bos_id=2 --eos_id=3"
            )
        self._size = int(self._processor.get_piece_size())
        while self._processor.is_unused(self._size - 1):  # no text has these pieces
            self._size -= 1

    @staticmethod
    def read(model: bytes, where: str) -> Vocabulary:
        """Return the vocabulary of any kind serialized in `model`; arguments and errors as for `__init__`."""
        if model.startswith(_SEPARATE):
            return SeparateVocabularies(model, where)
        return VocabularyPair(model, where) if model.startswith(_PAIR) else Vocabulary(model, where)

    @staticmethod
    def load(path: str | Path | list[str]) -> Vocabulary:
        """The vocabulary in a file, or separate ones in the files for source and target."""
        if isinstance(path, list):
            source, target = (Vocabulary.load(each) for each in path)
            return SeparateVocabularies.join(source, target, " and ".join(path))
        try:
            return Vocabulary.read(expanded(path).read_bytes(), str(path))
        except OSError as error:
            raise UserError(
                f"{unreadable(path, error)}; name an existing SentencePiece model, or let the run train one"
            ) from None

    def of(self, side: int) -> Vocabulary:
        """The vocabulary of a side, SOURCE or TARGET: this one, unless each has its own."""
        return self

    @property
    def size(self) -> int | list[int]:
        """The number of pieces; [source, target] if each side has a vocabulary of its own."""
        return len(self)

    @property
    def models(self) -> list[bytes]:
        """The serialized SentencePiece model, or those of source and target."""
        return [self.model]

    def __len__(self) -> int:
        return self._size

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the serialized form; a checkpoint identifies its vocabulary by it."""
        return hashlib.sha256(self.model).hexdigest()

    def piece(self, number: int) -> str:
        """Return the text of the piece with this id."""
        return str(self._processor.id_to_piece(number))

    def encode(self, lines: Sequence[str], side: int = SOURCE) -> list[list[int]]:
        """Return the piece ids of each line, without begin or end. side: SOURCE or TARGET, the side of the lines."""
        ids: list[list[int]] = self._processor.encode(list(lines), num_threads=self.threads)
        return ids

    def segment(self, lines: Sequence[str], side: int = SOURCE) -> list[list[str]]:
        """Return the pieces of each line as text; an unknown piece is the characters that it stands for."""
        pieces: list[list[str]] = self._processor.encode(list(lines), out_type=str, num_threads=self.threads)
        return pieces

    def unknown(self, lines: Sequence[str], side: int = SOURCE) -> list[list[str]]:
        """What the unknown pieces of each line stand for, in order."""
        both = zip(self.encode(lines, side), self.segment(lines, side), strict=True)
        return [[text for number, text in zip(*line, strict=True) if number == UNKNOWN] for line in both]

    def knows(self, tag: str) -> bool:
        """Whether a tag before a source is encoded without loss."""
        return UNKNOWN not in self.encode([tag])[0]

    def has_piece(self, text: str) -> bool:
        """Whether this text in a source becomes one piece."""
        return text in (self.piece(number).removeprefix(SPACE) for number in self.encode([text])[0])

    def unknown_code(self, line: str) -> str:
        """The language code at the beginning of a source, if the vocabulary should have a piece for it, but has none."""
        return ""

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Return the detokenized text of each sequence: one line each, although pieces can stand for bytes such as line ends.

        Begin, end and padding produce no text.
        """
        return [clean(self._processor.decode([int(i) for i in sequence if i > END or i == UNKNOWN])) for sequence in ids]

    def pieces_of(self, ids: Sequence[int], unknown: Iterable[str]) -> list[str]:
        """Return the texts of the pieces, without begin, end and padding; that of an unknown piece is the next of `unknown`."""
        texts = iter(unknown)
        return [next(texts) if i == UNKNOWN else self.piece(i) for i in ids if i > END or i == UNKNOWN]

    def decode_with(self, ids: Sequence[int], unknown: Iterable[str]) -> str:
        """Return the text of `ids` like `decode`, with each unknown piece replaced by the next of `unknown`."""
        return self._join(self.pieces_of(ids, unknown))

    def _join(self, pieces: list[str]) -> str:
        return clean(str(self._processor.decode_pieces(pieces)))

    def can_resample(self) -> bool:
        """Whether `resample` is possible: SentencePiece finds several segmentations only with a unigram model."""
        try:
            return bool(self._processor.nbest_encode_as_ids("a", 2))
        except RuntimeError:
            return False

    def resample(self, ids: np.ndarray, power: float, candidates: int, random: np.random.Generator) -> list[int]:
        """Sample a segmentation of the same text from the `candidates` best, with weights probability^`power` (Kudo 2018).

        If the ids contain unknown pieces, return them unchanged: unknown pieces do not determine the characters of the text.
        """
        if len(ids) == 0 or (ids == UNKNOWN).any():
            return list(ids)
        text = self._processor.decode(ids.tolist())
        found: list[list[int]] = self._processor.nbest_encode_as_ids(text, candidates)
        if whole := self._user_defined.intersection(ids.tolist()):  # which other segmentations may split
            found = [its for its in found if [i for i in its if i in whole] == [i for i in ids if i in whole]]
        scores = power * np.array([self._scores[candidate].sum() for candidate in found])
        weights = np.exp(scores - scores.max())
        return found[int(random.choice(len(found), p=weights / weights.sum()))]

    @cached_property
    def _user_defined(self) -> set[int]:
        """The user-defined pieces of a unigram model, whose other pieces have negative scores."""
        return {piece for piece in range(END + 1, len(self)) if self._scores[piece] == 0}

    @cached_property
    def _scores(self) -> np.ndarray:
        """Log-probability of each piece under the unigram model."""
        return np.array([self._processor.get_score(piece) for piece in range(len(self))])


class VocabularyPair(Vocabulary):
    """A SentencePiece model for each side, and one table of ids for the pieces of both, as in MarianMT models.

    A source may begin with a language piece such as >>fra<<, which SentencePiece does not see. `model` is _PAIR, then JSON.
    """

    def __init__(self, model: bytes, where: str) -> None:
        self.model = model
        try:
            held = json.loads(model.removeprefix(_PAIR))
            models = _sides(held)
            self.pieces: list[str] = [str(piece) for piece in held["pieces"]]
        except _DAMAGED:
            raise UserError(f"{where}: {_WHAT_IS_DAMAGED}") from None
        self.sides = [_processor(part, where) for part in models]
        self._ids = {piece: number for number, piece in enumerate(self.pieces)}
        if len(self._ids) < len(self.pieces) or len(self.pieces) <= END:
            raise UserError(f"{where}: the vocabulary has too few pieces, or repeated ones; restore it, or use another file")

    @classmethod
    def join(cls, source: bytes, target: bytes, pieces: Sequence[str], where: str) -> VocabularyPair:
        """Make a pair from two SentencePiece models and the pieces by id; `where` names them in errors."""
        held = {**_encoded([source, target]), "pieces": list(pieces)}
        return cls(_PAIR + json.dumps(held).encode(), where)

    @property
    def models(self) -> list[bytes]:
        return [side.serialized_model_proto() for side in self.sides]

    def __len__(self) -> int:
        return len(self.pieces)

    def piece(self, number: int) -> str:
        return self.pieces[number]

    def encode(self, lines: Sequence[str], side: int = SOURCE) -> list[list[int]]:
        return [[self._ids.get(piece, UNKNOWN) for piece in pieces] for pieces in self.segment(lines, side)]

    def segment(self, lines: Sequence[str], side: int = SOURCE) -> list[list[str]]:
        codes, texts = [], []
        for line in lines:
            code = code_of(line) if side == SOURCE else ""
            if code not in self._ids:  # ordinary text may look like one
                code = ""
            codes.append([code] if code else [])
            texts.append(line[len(code) :])
        found = self.sides[side].encode(texts, out_type=str, num_threads=self.threads)
        return [code + pieces for code, pieces in zip(codes, found, strict=True)]

    def knows(self, tag: str) -> bool:
        return not self.unknown_code(tag) and super().knows(tag)

    def unknown_code(self, line: str) -> str:
        code = code_of(line)
        return "" if code in self._ids else code

    def can_resample(self) -> bool:
        return False

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        return [self._join([self.pieces[int(i)] for i in sequence if i > END or i == UNKNOWN]) for sequence in ids]

    def _join(self, pieces: list[str]) -> str:
        return clean(str(self.sides[TARGET].decode_pieces(pieces))).strip()


class SeparateVocabularies(Vocabulary):
    """A vocabulary with ids of its own for each side. What is not asked of a side is of the target, which models write.

    `model` is _SEPARATE, then JSON.
    """

    def __init__(self, model: bytes, where: str) -> None:
        self.model = model
        try:
            models = _sides(json.loads(model.removeprefix(_SEPARATE)))
        except _DAMAGED:
            raise UserError(f"{where}: {_WHAT_IS_DAMAGED}") from None
        self._sides = [Vocabulary(part, where) for part in models]

    @classmethod
    def join(cls, source: Vocabulary, target: Vocabulary, where: str) -> SeparateVocabularies:
        """Make one value of the vocabularies of both sides; `where` names them in errors."""
        return cls(_SEPARATE + json.dumps(_encoded([source.model, target.model])).encode(), where)

    def of(self, side: int) -> Vocabulary:
        return self._sides[side]

    @property
    def size(self) -> int | list[int]:
        return [len(side) for side in self._sides]

    @property
    def models(self) -> list[bytes]:
        return [side.model for side in self._sides]

    def __len__(self) -> int:
        return len(self._sides[TARGET])

    def piece(self, number: int) -> str:
        return self._sides[TARGET].piece(number)

    def encode(self, lines: Sequence[str], side: int = SOURCE) -> list[list[int]]:
        return self._sides[side].encode(lines)

    def segment(self, lines: Sequence[str], side: int = SOURCE) -> list[list[str]]:
        return self._sides[side].segment(lines)

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        return self._sides[TARGET].decode(ids)

    def _join(self, pieces: list[str]) -> str:
        return self._sides[TARGET]._join(pieces)

    def can_resample(self) -> bool:
        return all(side.can_resample() for side in self._sides)


_DAMAGED = (ValueError, KeyError, TypeError, RecursionError)  # of a serialized pair
_WHAT_IS_DAMAGED = "the vocabulary is damaged; restore it, or use another file"


def _encoded(models: Sequence[bytes]) -> dict[str, str]:
    """The SentencePiece models of source and target as JSON."""
    return {side: base64.b64encode(model).decode() for side, model in zip(("source", "target"), models, strict=True)}


def _sides(held: dict[str, str]) -> list[bytes]:
    """The reverse of `_encoded`; one of _DAMAGED if that is not possible."""
    return [base64.b64decode(held[side]) for side in ("source", "target")]


def code_of(line: str) -> str:
    """The language code that a line begins with, such as >>fra<<, or an empty string."""
    found = re.match(r">>[^\s<>]+<<", line)
    return found[0] if found else ""


def _processor(model: bytes, where: str) -> sentencepiece.SentencePieceProcessor:
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
    except (RuntimeError, ValueError):
        raise UserError(f"{where}: not a SentencePiece model; restore it, or use another file") from None
    return processor
