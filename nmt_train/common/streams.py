"""Standard output and standard error: neither a missing character nor a full disk behind them ends a command."""

from __future__ import annotations

import codecs
import io
import os
import sys
from contextlib import suppress
from typing import TextIO

_ESCAPED = "nmt_train.escaped"


def prepare() -> None:
    """Let any text be printed. Call this before a command prints.

    On stdout, characters that the encoding lacks are escaped, as on stderr; the bytes of a path that are not text in this
    encoding are printed as they are. If the caller has closed stderr, messages are discarded.
    """
    codecs.register_error(_ESCAPED, _escaped)
    if sys.stderr is None:  # printing to None would print to stdout
        sys.stderr = open(os.devnull, "w", encoding="utf-8")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=_ESCAPED)


def tell(text: str) -> None:
    """Print a line on stderr. If it cannot be written (full disk, closed terminal), the line is lost and nothing else."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def finish(stream: TextIO | None) -> None:
    """Flush a stream. If that fails, discard what it holds: the interpreter would try again at exit, and change the status."""
    try:
        if stream is not None:
            stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # type: ignore[union-attr]


def _escaped(error: UnicodeError) -> tuple[str | bytes, int]:
    """An error handler of `codecs`."""
    assert isinstance(error, UnicodeEncodeError)
    code = ord(error.object[error.start])
    if 0xDC80 <= code <= 0xDCFF:  # a byte that os.fsdecode could not decode
        return bytes([code - 0xDC00]), error.start + 1
    return rf"\x{code:02x}" if code < 0x100 else rf"\u{code:04x}" if code < 0x10000 else rf"\U{code:08x}", error.start + 1
