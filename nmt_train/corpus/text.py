"""Read lines of text files: they are UTF-8, only a line feed ends a line, and spaces replace control characters."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO

import numpy as np

from nmt_train.common.errors import UserError
from nmt_train.common.plural import counted
from nmt_train.corpus import MAX_RATIO, CorpusPart, Files, formats

# Control characters and Unicode line separators, which would break the rule of one sentence per line; tabs are kept.
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")
_INSIDE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")  # the same in text of several lines
_ASCII_CONTROL = bytes([*range(9), *range(11, 32), 127])  # without the line feed
_C1_CONTROL = re.compile(b"\xc2[\x80-\x9f]")  # in UTF-8
_SEPARATORS = (b"\xe2\x80\xa8", b"\xe2\x80\xa9")  # in UTF-8
_WIDE = 0.4  # the share of zero bytes from which a line is taken for UTF-16
_LARGEST_WEIGHT = 1e6  # of a sentence; sums of weights are in fp32
LONGEST_LINE = 10_000_000
_BOM = b"\xef\xbb\xbf"


class NotUtf8(UserError):
    """A line is not UTF-8."""


Invalid = Callable[[int, bytes], str]  # called with the number and the bytes of a line that is not UTF-8; returns its text


def clean(line: str) -> str:
    """Return `line` with every control character, U+0085, U+2028 and U+2029 replaced by a space."""
    return _CONTROL.sub(" ", line)


def decode_lines(stream: BinaryIO, name: str, invalid: Invalid | None = None) -> Iterator[str]:
    """Yield the cleaned lines of a binary `stream` without their ends (LF or CRLF), as soon as they arrive.

    A UserError names the file if its first bytes are those of another format, and the file and the line of invalid UTF-8
    (`NotUtf8`, without `invalid`) or of a line that is too long to be text; such a line is rejected before it fills the memory.
    """
    return _decoded(iter(lambda: stream.readline(LONGEST_LINE), b""), name, invalid)


def read_lines(path: str | Path, ratio: float = MAX_RATIO) -> Iterator[str]:
    """Yield the cleaned lines of a plain or compressed file.

    Raises UserError as `formats.blocks` and `decode_lines` do.
    """
    return _decoded(formats.blocks(path, ratio), str(path))


def _decoded(blocks: Iterator[bytes], name: str, invalid: Invalid | None = None) -> Iterator[str]:
    """The cleaned lines of bytes that come in blocks. Lines of ordinary text are decoded many at a time."""
    number, parts = 0, _whole_lines(blocks)
    for part in parts:
        if not number:
            first, part = _first_line(part, 1, name)
            if other := formats.other_format(first, name):
                raise UserError(other)
            first = first.removeprefix(_BOM)
            if not part and _damage(first):
                part = next(parts, b"")
            number = 1
            yield _decode(first, number, name, invalid, part[:1])
        if not part:
            continue
        _first_line(part, number + 1, name)  # only the first line of a part can be longer than a block
        lines = _decode_all(part)
        for line in lines if lines is not None else _one_by_one(part, number, name, invalid):
            number += 1
            yield line


def _whole_lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Parts that end with a line feed, but for the last one, and for one that is too long to be a line."""
    left: list[bytes] = []
    for block in blocks:
        end = block.rfind(b"\n") + 1
        if end:
            yield b"".join([*left, block[:end]])
            left = []
        left.append(block[end:])
        if sum(map(len, left)) >= LONGEST_LINE:
            yield b"".join(left)
            left = []
    if any(left):
        yield b"".join(left)


def _first_line(part: bytes, number: int, name: str) -> tuple[bytes, bytes]:
    """The first line of a part, with its line feed, and the rest; UserError if the line is too long to be text."""
    end = part.find(b"\n") + 1 or len(part)
    if end >= LONGEST_LINE:
        raise UserError(
            f"{name}, line {number}: longer than {LONGEST_LINE:,} bytes; give a text file with one sentence per line"
        )
    return part[:end], part[end:]


def _decode_all(part: bytes) -> list[str] | None:
    """The cleaned lines of a part, or None if one of them needs a closer look."""
    if b"\0" in part or part.endswith(b"\r"):
        return None
    if b"\r" in part:
        part = part.replace(b"\r\n", b"\n")
    try:
        text = part.decode("utf-8")
    except UnicodeDecodeError:
        return None
    ascii_control = len(part.translate(None, _ASCII_CONTROL)) < len(part)
    if ascii_control or any(mark in part for mark in _SEPARATORS) or _C1_CONTROL.search(part):
        text = _INSIDE.sub(" ", text)
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return lines


def _one_by_one(part: bytes, before: int, name: str, invalid: Invalid | None) -> Iterator[str]:
    """The cleaned lines of a part. before: how many lines are before it."""
    for number, raw in enumerate(part.removesuffix(b"\n").split(b"\n"), before + 1):
        yield _decode(raw, number, name, invalid)


def _decode(raw: bytes, number: int, name: str, invalid: Invalid | None, following: bytes = b"") -> str:
    """The cleaned text of a line. following: the byte after the first line; see `_wide`."""
    line = raw.removesuffix(b"\n").removesuffix(b"\r")
    error = _damage(raw)
    if error is None:
        return clean(line.decode("utf-8"))
    if number == 1 and (order := _wide(line, following)):
        raise UserError(f"{name}: is UTF-16; convert it to UTF-8 (iconv -f UTF-16{order} -t UTF-8)")
    if invalid is not None:
        return clean(invalid(number, line))
    raise NotUtf8(f"{name}, line {number}: not UTF-8 (byte {error.start + 1} of the line); convert the file, e.g. with iconv")


def _damage(raw: bytes) -> UnicodeDecodeError | None:
    """Why a line is not UTF-8."""
    line = raw.removesuffix(b"\n").removesuffix(b"\r")
    if (zeros := line.count(0)) > max(1, _WIDE * len(line)):
        return UnicodeDecodeError("utf-8", line, line.index(0), len(line), f"{zeros} zero bytes")
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        return error
    return None


def _wide(first: bytes, following: bytes) -> str:
    """The byte order, LE or BE, of text in UTF-16 without a mark; an empty string if it is something else.

    first: its first line, which is not UTF-8, up to the byte 10, which is the second byte of a line feed in BE, and the first
    in LE. One of the two bytes is zero; text in other encodings has no zero bytes. following: the byte after it, if any.
    """
    if len(first) % 2:
        return "BE" if first.endswith(b"\x00") else ""
    if following == b"\x00":
        return "LE"
    return "BE" if first[:1] == b"\x00" else "LE" if first[1:2] == b"\x00" else ""  # a single line without line feed


class Lines:
    """The cleaned lines of a binary stream, up to the first error.

    number: how many lines were read. invalid: the numbers of the lines that were not UTF-8. error: what ended reading early.
    """

    def __init__(self, stream: BinaryIO, name: str, on_error: str) -> None:
        """on_error: `replace` invalid bytes of a line by U+FFFD, `skip` its text, or `stop` there."""
        self._lines = decode_lines(stream, name, None if on_error == "stop" else self._accept)
        self._replaces = on_error == "replace"
        self.number = 0
        self.invalid: list[int] = []
        self.error: UserError | None = None

    def __iter__(self) -> Iterator[str]:
        try:
            for line in self._lines:
                self.number += 1
                yield line
        except UserError as error:
            self.error = error

    def _accept(self, number: int, raw: bytes) -> str:
        self.invalid.append(number)
        return raw.decode("utf-8", "replace") if self._replaces else ""


def sides(files: Files, key: str) -> list[list[str]]:
    """Convert `files` of the configuration to one list of TSV files, or to two lists: source files and target files.

    key: the configuration key of `files`, for error messages. Raises UserError for any other form.
    """
    entries = [files] if isinstance(files, str) else files
    lists = [[os.path.expanduser(path) for path in ([entry] if isinstance(entry, str) else entry)] for entry in entries]
    if len(lists) not in (1, 2) or not all(lists):
        raise UserError(f"{key}: give [source, target] or [pairs.tsv]; there are {len(lists)} entries")
    if len(lists) == 2 and all(path.removesuffix(formats.suffix(path)).endswith(".tsv") for entry in lists for path in entry):
        raise UserError(
            f"{key}: has two entries, a source and a target, but a .tsv file has both; give several .tsv files as one entry:"
            " [[a.tsv, b.tsv]]"
        )
    return lists


def read_pairs(files: Files, key: str, ratio: float = MAX_RATIO) -> Iterator[tuple[str, str]]:
    """Yield the (source, target) lines of `files`; `key` as for `sides`, `ratio` as for `read_lines`.

    Raises UserError if the sides have different numbers of lines, if a TSV line has no second column, or if
    a file cannot be read.
    """
    lists = sides(files, key)
    if len(lists) == 1:
        for path in lists[0]:
            yield from _read_tsv(path, ratio)
        return
    source, target = (_numbered(paths, ratio) for paths in lists)
    for count, (left, right) in enumerate(zip_longest(source, target)):
        if left is None or right is None:
            longer = count + 1 + sum(1 for _ in (target if left is None else source))
            lines = (count, longer) if left is None else (longer, count)
            both = [f"{', '.join(paths)} has {counted(number, 'line')}" for paths, number in zip(lists, lines, strict=True)]
            raise UserError(
                f"{key}: {' and '.join(both)}; give files in which equal line numbers are translations of each other"
            )
        yield left, right


def read_weights(part: CorpusPart, key: str, ratio: float = MAX_RATIO) -> Iterator[float]:
    """Yield the weight of each pair of a corpus with `sentence_weights`; arguments as for `read_pairs`.

    Raises UserError for a weight that is not a number of at least 0.
    """
    if part.sentence_weights != "column":
        path = os.path.expanduser(str(part.sentence_weights))
        for number, line in enumerate(read_lines(path, ratio), 1):
            yield _weight(line, path, number)
        return
    lists = sides(part.files, key)
    if len(lists) != 1:
        raise UserError(f"{key}: sentence_weights: column is for .tsv files; give a file with one weight per line")
    for path in lists[0]:
        for number, line in enumerate(read_lines(path, ratio), 1):
            yield _weight((line.split("\t") + [""] * 3)[2], path, number)


def weights_of(part: CorpusPart, key: str, pairs: int, ratio: float = MAX_RATIO) -> np.ndarray:
    """The weights of all pairs of a corpus with `sentence_weights` (pairs,), float32; arguments and errors as `read_weights`.

    Raises UserError also if there is not one weight for each of the `pairs`.
    """
    weights = np.fromiter(read_weights(part, key, ratio), np.float32)
    if len(weights) != pairs:
        where = f"{key}: sentence_weights: {part.sentence_weights}"
        raise UserError(f"{where} has {len(weights):,} lines, and the corpus {pairs:,}; give one per pair")
    return weights


def refuse_empty(key: str, source: bool, target: bool) -> None:
    """Raise UserError unless both sides have text."""
    if not (source and target):
        empty = "source side is" if target else "target side is" if source else "files are"
        raise UserError(f"{key}: the {empty} empty; give files that contain text")


def _weight(text: str, path: str, line: int) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= _LARGEST_WEIGHT:
        raise UserError(
            f"{path}, line {line}: the weight {text[:40]!r} is not a number from 0 to {_LARGEST_WEIGHT:,.0f}; correct the line"
        )
    return value


def _numbered(paths: list[str], ratio: float) -> Iterator[str]:
    for path in paths:
        yield from read_lines(path, ratio)


def _read_tsv(path: str, ratio: float) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(read_lines(path, ratio), 1):
        columns = line.split("\t")
        if len(columns) < 2:
            raise UserError(
                f"{path}, line {number}: no tab; give two files, or one .tsv file whose first two columns are source and target"
            )
        yield columns[0], columns[1]
