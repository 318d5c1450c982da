"""Console commands: parse arguments, call one function, print. No logic."""

from __future__ import annotations

import argparse
import errno
import itertools
import math
import re
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from nmt_train.common.errors import TRY_AGAIN, UserError

_READER_GONE = 141  # as a shell reports SIGPIPE
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
# What torch says, which has one class of error for almost everything; and --help does without torch.
_NO_MEMORY = re.compile("out of memory|can't allocate memory|not enough memory|STATUS_ALLOC_FAILED")
_FAULT = re.compile("(CUDA|HIP|cuDNN|NCCL) error|(CUDNN|CUBLAS|CUSPARSE|CUSOLVER|CUFFT)_STATUS_")


class Parser(argparse.ArgumentParser):
    """An argparse parser whose complaints are `UserError`s, and which drops none of two values for an option."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        seen = set()
        for word in itertools.takewhile(lambda word: word != "--", args or ()):
            name = word.partition("=")[0]
            action = self._option_string_actions.get(name)
            if action in seen:
                self.error(f"{name} is given twice; give it once")
            if action is not None and not isinstance(action, argparse._AppendAction):
                seen.add(action)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"command line: {message}; see {self.prog} --help")


def run(command: Callable[[Sequence[str]], int], arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status is 2 for the user's mistakes, 75 for what a new start may mend, 1 for our mistakes, each
    with one sentence on stderr.
    """
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
        return error.status, f"error: {error}"
    if isinstance(error, BrokenPipeError):
        return _READER_GONE, ""
    if isinstance(error, OSError) and error.errno in _FULL:
        return 2, f"error: {error.filename or 'output'}: {error.strerror}; check free space and permissions"
    if _out_of_memory(error):
        return 2, "error: out of memory; make batch.tokens, model or beam smaller"
    if isinstance(error, RuntimeError) and _FAULT.search(str(error)):
        what = str(error).partition("\n")[0]
        return TRY_AGAIN, (
            f"error: host {socket.gethostname()}: the device failed: {what}; start the same command again: it continues from"
            " the last checkpoint; if that does not help, look at the GPU (nvidia-smi, dmesg)"
        )
    return 1, f"internal error: {type(error).__name__}: {error}; please report it, with what --debug shows"


def _out_of_memory(error: Exception) -> bool:
    """Whether memory could not be had: the machine's or a device's."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None


def bounded(kind: Callable[[str], float], name: str, low: float, high: float = math.inf) -> Callable[[str], float]:
    """An argparse type: finite numbers of a kind from `low` to `high`; `name` is what argparse calls them."""

    def read(text: str) -> float:
        value = kind(text)
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text} is not a finite number")
        if not low <= value <= high:
            span = f"at least {low}" if math.isinf(high) else f"between {low} and {high}"
            raise argparse.ArgumentTypeError(f"{text} is not {span}")
        return value

    read.__name__ = name
    return read


positive = bounded(int, "positive", 1)
count = bounded(int, "count", 0)
threads = bounded(int, "threads", 0, 1024)
power = bounded(float, "power", 0, 10)  # the exponent of length normalisation
finite = bounded(float, "finite", -math.inf)
