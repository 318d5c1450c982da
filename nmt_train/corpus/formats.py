"""The formats of text files: reads those that are compressed (.gz, .xz and .zst), and knows others by their first bytes."""

from __future__ import annotations

import gzip
import importlib
import lzma
import math
import os
import re
import zlib
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import Any, NamedTuple

from nmt_train.common.errors import UserError, remedy, unreadable
from nmt_train.corpus import MAX_RATIO

BLOCK = 1 << 20  # bytes that are read at a time
_SMALL = 1 << 26  # a compressed file of any size may contain this many bytes of text


class Format(NamedTuple):
    """A format of compressed files. marks: what such a file begins with. unpack: the command that decompresses it."""

    name: str
    marks: tuple[bytes, ...]
    unpack: str


COMPRESSED = {
    ".gz": Format("gzip", (b"\x1f\x8b",), "gzip -d"),
    ".xz": Format("xz", (b"\xfd7zXZ\x00",), "xz -d"),
    # The second mark is that of a frame to skip, with which pzstd begins; its first byte may have 16 values.
    ".zst": Format(
        "zstd", (b"\x28\xb5\x2f\xfd", *(bytes([first]) + b"\x2a\x4d\x18" for first in range(0x50, 0x60))), "zstd -d"
    ),
}
# The first bytes of other formats, and how to turn such a file into text. UTF-32 is before UTF-16, whose mark begins alike.
_OTHERS = {
    b"BZh": ("compressed with bzip2", "decompress it (bzip2 -d)"),
    b"PK\x03\x04": ("a .zip archive", "unpack it (unzip)"),
    b"\xff\xfe\x00\x00": ("UTF-32", "convert it to UTF-8 (iconv -f UTF-32 -t UTF-8)"),
    b"\x00\x00\xfe\xff": ("UTF-32", "convert it to UTF-8 (iconv -f UTF-32 -t UTF-8)"),
    b"\xff\xfe": ("UTF-16", "convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)"),
    b"\xfe\xff": ("UTF-16", "convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)"),
}
_BZIP2 = re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)")  # what follows these letters, which may begin a text, too


def suffix(path: str | Path) -> str:
    """The suffix of a compressed file, or an empty string."""
    return next((end for end in COMPRESSED if str(path).endswith(end)), "")


def open_binary(path: str | Path) -> BufferedIOBase:
    """Open a file of text for reading. Raises UserError if the package for .zst is missing, and OSError."""
    match suffix(path):
        case ".gz":
            return gzip.open(path, "rb")
        case ".xz":
            return lzma.open(path, "rb")
        case ".zst":
            opened: BufferedIOBase = _zstd(path).open(path, "rb")
            return opened
    return open(path, "rb")


def blocks(path: str | Path, ratio: float = MAX_RATIO) -> Iterator[bytes]:
    """Yield the bytes of the text in a file, a block at a time.

    Raises UserError if the file is missing, unreadable, damaged or not of the format that its name says, or if the text of a
    compressed file is more than `ratio` times as long as the file.
    """
    end, read = suffix(path), 0
    try:
        longest = max(_SMALL, ratio * os.stat(path).st_size) if end else math.inf
        if end:
            _refuse_other_format(path, end)
        with open_binary(path) as stream:
            while block := stream.read1(BLOCK):  # from a pipe, what has come
                read += len(block)
                if read > longest:
                    raise UserError(
                        f"{path}: its text is more than {ratio:g} times as long as the file; check the file, and raise"
                        " corpus.max_ratio if it is correct"
                    )
                yield block
    except _damage(end) as error:
        raise UserError(f"{unreadable(path, error)}; {remedy(error, 'check the file')}") from None


def of_compressed(first: bytes) -> str:
    """What a file that begins with these bytes is compressed with, and what to do; an empty string if it is not compressed."""
    for end, its in COMPRESSED.items():
        if first.startswith(its.marks):
            return f"compressed with {its.name}; give it a name that ends in {end}, or decompress it ({its.unpack})"
    return ""


def other_format(first: bytes, name: str) -> str:
    """A sentence on the format of a file that begins with these bytes, if it is not text in UTF-8; else an empty string."""
    if what := of_compressed(first):
        if end := suffix(name):
            what = f"{what.partition(';')[0]} twice; decompress it once ({COMPRESSED[end].unpack})"
        return f"{name}: is {what}"
    for mark, (what, action) in _OTHERS.items():
        if first.startswith(mark) and (mark != b"BZh" or _BZIP2.match(first)):
            return f"{name}: is {what}; {action}"
    return ""


def _refuse_other_format(path: str | Path, end: str) -> None:
    with open(path, "rb") as file:
        first = file.read(16)
    if first and not first.startswith(COMPRESSED[end].marks):
        what = of_compressed(first) or f"not compressed with {COMPRESSED[end].name}; rename it"
        raise UserError(f"{path}: its name ends in {end}, but it is {what}")


def _damage(end: str) -> tuple[type[Exception], ...]:
    """The exceptions for files of this format that cannot be read."""
    module = _find_zstd() if end == ".zst" else None
    return (OSError, EOFError, zlib.error, lzma.LZMAError, *([module.ZstdError] if module else []))


def _zstd(path: str | Path) -> Any:
    if (module := _find_zstd()) is None:
        raise UserError(
            f"{path}: reading .zst needs a package: pip install backports.zstd (or nmt_train[zstd]); or decompress the file"
            " (zstd -d)"
        )
    return module


def _find_zstd() -> Any:
    """Python's module for .zst (from version 3.14 on), or the package that has it for earlier versions, or None."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None
