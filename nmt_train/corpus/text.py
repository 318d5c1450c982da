"""Read lines of text files: they are UTF-8, only a line feed ends a line, and spaces replace control characters."""

from __future__ import annotations

import gzip
import math
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from nmt_train.common.errors import UserError, remedy, unreadable
from nmt_train.common.plural import counted
from nmt_train.corpus import MAX_RATIO, CorpusPart, Files

# Control characters and Unicode line separators, which would break the rule of one sentence per line; tabs are kept.
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")
_WIDE = 0.4  # the share of zero bytes from which a line is taken for UTF-16
# The first bytes of other formats, and how to turn such a file into text. UTF-32 is before UTF-16, whose mark begins alike.
_FORMATS = {
    b"\x1f\x8b": ("compressed with gzip", "give it a name that ends in .gz, or decompress it (gzip -d)"),
    b"\xfd7zXZ\x00": ("compressed with xz", "decompress it (xz -d)"),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "decompress it (zstd -d)"),
    b"BZh": ("compressed with bzip2", "decompress it (bzip2 -d)"),
    b"PK\x03\x04": ("a .zip archive", "unpack it (unzip)"),
    b"\xff\xfe\x00\x00": ("UTF-32", "convert it to UTF-8 (iconv -f UTF-32 -t UTF-8)"),
    b"\x00\x00\xfe\xff": ("UTF-32", "convert it to UTF-8 (iconv -f UTF-32 -t UTF-8)"),
    b"\xff\xfe": ("UTF-16", "convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)"),
    b"\xfe\xff": ("UTF-16", "convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)"),
}
_BZIP2 = re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)")  # what follows these letters, which may begin a text, too
_LARGEST_WEIGHT = 1e6  # of a sentence; sums of weights are in fp32
LONGEST_LINE = 10_000_000
_SMALL = 1 << 26  # a .gz file of any size may contain this many bytes of text
_BOM = b"\xef\xbb\xbf"


class NotUtf8(UserError):
    """A line is not UTF-8."""


def clean(line: str) -> str:
    """Return `line` with every control character, U+0085, U+2028 and U+2029 replaced by a space."""
    return _CONTROL.sub(" ", line)


def decode_lines(stream: BinaryIO, name: str, invalid: Callable[[int, bytes], str] | None = None) -> Iterator[str]:
    """Yield the cleaned lines of a binary `stream` without their ends (LF or CRLF).

    invalid: called with the number and the bytes of a line that is not UTF-8; returns the text to use for it.

    A UserError names the file if its first bytes are those of another format, and the file and the line of invalid UTF-8
    (`NotUtf8`) or of a line that is too long to be text; such a line is rejected before it fills the memory.
    """
    for number, raw in enumerate(iter(lambda: stream.readline(LONGEST_LINE), b""), 1):
        if len(raw) == LONGEST_LINE:
            raise UserError(
                f"{name}, line {number}: longer than {LONGEST_LINE:,} bytes; give a text file with one sentence per line"
            )
        if number == 1:
            if other := _other_format(raw, name):
                raise UserError(other)
            raw = raw.removeprefix(_BOM)
        raw = raw.rstrip(b"\n").removesuffix(b"\r")
        try:
            if (zeros := raw.count(0)) > max(1, _WIDE * len(raw)):
                raise UnicodeDecodeError("utf-8", raw, raw.index(0), len(raw), f"{zeros} zero bytes")
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            if number == 1 and (order := _wide(raw, stream)):
                raise UserError(f"{name}: is UTF-16; convert it to UTF-8 (iconv -f UTF-16{order} -t UTF-8)") from None
            if invalid is not None:
                yield clean(invalid(number, raw))
                continue
            raise NotUtf8(
                f"{name}, line {number}: not UTF-8 (byte {error.start + 1} of the line); convert the file, e.g. with iconv"
            ) from None
        yield clean(line)


def _other_format(first: bytes, name: str) -> str:
    """A sentence on the format of a file that begins with this line, if it is not text in UTF-8; else an empty string."""
    for mark, (what, action) in _FORMATS.items():
        if first.startswith(mark) and (mark != b"BZh" or _BZIP2.match(first)):
            twice = " twice" if name.endswith(".gz") and "compressed" in what else ""
            return f"{name}: is {what}{twice}; {'decompress it once (gzip -d)' if twice else action}"
    return ""


def _wide(first: bytes, stream: BinaryIO) -> str:
    """The byte order, LE or BE, of a stream in UTF-16 without a mark; an empty string if it is something else.

    first: its first line, which is not UTF-8, up to the byte 10, which is the second byte of a line feed in BE, and the first
    in LE. One of the two bytes is zero; text in other encodings has no zero bytes.
    """
    if len(first) % 2:
        return "BE" if first.endswith(b"\x00") else ""
    if stream.read(1) == b"\x00":
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


def read_lines(path: str | Path, ratio: float = MAX_RATIO) -> Iterator[str]:
    """Yield the cleaned lines of a plain or .gz file.

    Raises UserError if the file is missing, unreadable, damaged or not UTF-8, or if the text of a .gz file is more than `ratio`
    times as long as the file.
    """
    try:
        with open_binary(path) as stream:
            packed = isinstance(stream, gzip.GzipFile)
            longest = max(_SMALL, ratio * os.stat(path).st_size) if packed else math.inf
            for line in decode_lines(stream, str(path)):
                if packed and stream.tell() > longest:
                    raise UserError(
                        f"{path}: its text is more than {ratio:g} times as long as the file; check the file, and raise"
                        " corpus.max_ratio if it is correct"
                    )
                yield line
    except gzip.BadGzipFile as error:
        with open(path, "rb") as plain:
            what = _other_format(plain.read(16), "").removeprefix(": is ") or "not compressed with gzip; rename it"
        raise UserError(f"{path}: its name ends in .gz, but it is {what} ({error})") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{unreadable(path, error)}; {remedy(error, 'check the file')}") from None


def open_binary(path: str | Path) -> BinaryIO:
    if str(path).endswith(".gz"):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    return open(path, "rb")


def sides(files: Files, key: str) -> list[list[str]]:
    """Convert `files` of the configuration to one list of TSV files, or to two lists: source files and target files.

    key: the configuration key of `files`, for error messages. Raises UserError for any other form.
    """
    entries = [files] if isinstance(files, str) else files
    lists = [[os.path.expanduser(path) for path in ([entry] if isinstance(entry, str) else entry)] for entry in entries]
    if len(lists) not in (1, 2) or not all(lists):
        raise UserError(f"{key}: give [source, target] or [pairs.tsv]; there are {len(lists)} entries")
    if len(lists) == 2 and all(path.endswith((".tsv", ".tsv.gz")) for entry in lists for path in entry):
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
    count = 0
    while True:
        left, right = next(source, None), next(target, None)
        if left is None and right is None:
            return
        if left is None or right is None:
            longer = count + 1 + sum(1 for _ in (target if left is None else source))
            lines = (count, longer) if left is None else (longer, count)
            both = [f"{', '.join(paths)} has {counted(number, 'line')}" for paths, number in zip(lists, lines, strict=True)]
            raise UserError(
                f"{key}: {' and '.join(both)}; give files in which equal line numbers are translations of each other"
            )
        count += 1
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
            raise UserError(f"{path}, line {number}: no tab; a .tsv corpus has source and target in its first two columns")
        yield columns[0], columns[1]
