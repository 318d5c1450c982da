"""Console commands: parse arguments, call one function, print. No logic."""

from __future__ import annotations

import argparse
import errno
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from nmt_train.errors import UserError

_READER_GONE = 141  # as a shell reports SIGPIPE
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)


class Parser(argparse.ArgumentParser):
    """An argparse parser whose complaints are `UserError`s."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"command line: {message}; see {self.prog} --help")


def run(command: Callable[[Sequence[str]], int], arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status is 2 for the user's mistakes, 1 for ours, each with one sentence on stderr."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return command(given)
    except Exception as error:
        if "--debug" in given:
            traceback.print_exception(error)
        status, message = _explain(error)
    except KeyboardInterrupt:
        return 130
    if status == _READER_GONE:
        sys.stderr.close()  # or the interpreter would complain about the broken pipe at exit
    else:
        print(message, file=sys.stderr)
    return status


def _explain(error: Exception) -> tuple[int, str]:
    """The exit status and sentence of an error."""
    if isinstance(error, UserError):
        return 2, f"error: {error}"
    if isinstance(error, BrokenPipeError):
        return _READER_GONE, ""
    if isinstance(error, OSError) and error.errno in _FULL:
        return 2, f"error: {error.filename or 'output'}: {error.strerror}; check free space and permissions"
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "memory" in str(error)):
        return 2, "error: out of memory; make batch.tokens, model or beam smaller"
    return 1, f"internal error: {type(error).__name__}: {error}; please report it, with what --debug shows"


def positive(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def threads(text: str) -> int:
    """An argparse type: a number of threads, 0 for the default."""
    value = int(text)
    if not 0 <= value <= 1024:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1024")
    return value


def finite(text: str) -> float:
    """An argparse type: a number that is neither infinite nor nan."""
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return value


def power(text: str) -> float:
    """An argparse type: the exponent of length normalisation."""
    value = finite(text)
    if not 0 <= value <= 10:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 10")
    return value
