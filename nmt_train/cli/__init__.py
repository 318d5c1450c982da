"""Console commands: parse arguments, call one function, print. No logic."""

from __future__ import annotations

import argparse
import errno
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from nmt_train.errors import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)


class Parser(argparse.ArgumentParser):
    """An argparse parser whose complaints are `UserError`s."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"command line: {message}; see {self.prog} --help")


def run(command: Callable[[Sequence[str]], int], arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status is 2 for the user's mistakes, 1 for ours, each with one sentence on stderr."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    try:
        return command([argument for argument in given if argument != "--debug"])
    except UserError as error:
        status, message = 2, f"error: {error}"
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader went away; the interpreter must not complain about it at exit
        return 141
    except OSError as error:
        status = 2 if error.errno in _FULL else 1
        message = f"error: {error.filename or 'output'}: {error.strerror}; check free space and permissions"
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            status, message = 1, _ours(error)
        else:
            status, message = 2, "error: out of memory; make batch.tokens, model or beam smaller"
    except Exception as error:
        status, message = 1, _ours(error)
    if debug:
        traceback.print_exc()
    print(message, file=sys.stderr)
    return status


def _ours(error: Exception) -> str:
    return f"internal error: {type(error).__name__}: {error}; please report it, with what --debug shows"


def positive(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value
