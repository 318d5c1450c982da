"""Console commands: parse arguments, call one function, print. No logic."""

from __future__ import annotations

import argparse
import difflib
import errno
import itertools
import math
import re
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from nmt_train import __version__
from nmt_train.common import launcher, streams
from nmt_train.common.errors import TRY_AGAIN, UserError, remedy, status_of

_READER_GONE = 141  # the exit status that a shell reports for SIGPIPE (the reader of a pipe has closed it)
_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors only of writing
# Patterns for torch's error messages: torch has one exception class for almost everything, and importing it here would be slow.
_NO_MEMORY = re.compile("out of memory|can't allocate memory|not enough memory|STATUS_ALLOC_FAILED")
_FAULT = re.compile("(CUDA|HIP|cuDNN|NCCL) error|(CUDNN|CUBLAS|CUSPARSE|CUSOLVER|CUFFT)_STATUS_")


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises `UserError` for every error, and rejects an option that is given twice."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})
        self._negative_number_matcher = re.compile(r"-\.?\d")  # values such as -5e belong to the option before them, too
        self.add_argument("--version", action="version", version=f"nmt_train {__version__}")

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

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            near = difflib.get_close_matches(rest[0].partition("=")[0], self._option_string_actions, n=1)
            self.error(f"{rest[0]!r} belongs to no option" + "".join(f"; did you mean {name}?" for name in near))
        return found

    def error(self, message: str) -> NoReturn:
        raise UserError(f"command line: {message}; see {self.prog} --help")


def run(command: Callable[[Sequence[str]], int], arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status; print one sentence on stderr for every error.

    The status is 2 for a user error, 75 for an error that a restart may fix, 130 after Ctrl-C, and 1 for an internal error.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    streams.prepare()
    try:
        status, message = command(given), ""
        if sys.stdout is not None:  # it is None if the caller has closed it
            sys.stdout.flush()
    except Exception as error:
        if "--debug" in given:
            streams.tell("".join(traceback.format_exception(error)).rstrip())
        status, message = _explain(error)
        if isinstance(error, OSError):
            streams.finish(sys.stdout)
    except KeyboardInterrupt:
        return 130
    if message:
        streams.tell(message)
    streams.finish(sys.stderr)
    return status


def run_rank(command: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run a command, and exit with its status, in a process that may be one of several ranks."""
    status = run(command)
    if launcher.launched():
        from nmt_train.transport.mpi.runtime import leave

        streams.finish(sys.stdout)
        leave(status)
    sys.exit(status)


def _explain(error: Exception) -> tuple[int, str]:
    """Return the exit status and the message for an error; the error's notes say where it occurred."""
    if isinstance(error, BrokenPipeError):
        return _READER_GONE, ""
    status, said = _described(error)
    where = "".join(f"{note}: " for note in getattr(error, "__notes__", ()))
    return status, f"{'error' if status != 1 else 'internal error'}: {where}{said}"


def _described(error: Exception) -> tuple[int, str]:
    """Return the exit status, and a sentence about an error."""
    if isinstance(error, UserError):
        return error.status, str(error)
    if isinstance(error, OSError) and (status := status_of(error)) != 1:
        where = error.filename or ("output" if error.errno in _OUTPUT else "input or output")
        return status, f"{where}: {error.strerror}; {remedy(error)}"
    if _out_of_memory(error):
        return 2, "out of memory; make batches (batch.tokens, --batch-tokens), the beam or the model smaller"
    if isinstance(error, RuntimeError) and _FAULT.search(str(error)):
        what = str(error).partition("\n")[0]
        return TRY_AGAIN, (
            f"host {socket.gethostname()}: the device failed: {what}; start the same command again: it continues from"
            " the last checkpoint; if that does not help, check the GPU (nvidia-smi, dmesg)"
        )
    return 1, f"{type(error).__name__}: {error}; please report it with the output of --debug"


def _out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed, in the memory of the machine or of a device."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None


def bounded(kind: Callable[[str], float], low: float, high: float = math.inf) -> Callable[[str], float]:
    """Return an argparse type for finite numbers from `low` to `high`. kind: int or float."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a {'whole ' * (kind is int)}number") from None
        if isinstance(value, float) and not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text} is not a finite number")
        if not low <= value <= high:
            span = f"at least {low}" if math.isinf(high) else f"between {low} and {high}"
            raise argparse.ArgumentTypeError(f"{text} is not {span}")
        return value

    return read


positive = bounded(int, 1, 10**9)
beam = bounded(int, 1, 1000)
count = bounded(int, 0)
threads = bounded(int, 0, 1024)
power = bounded(float, 0, 10)  # the exponent of length normalization
finite = bounded(float, -math.inf)


def add_search_options(options: Parser) -> None:
    _add(options, "--beam", beam, 5, "beam size: hypotheses kept per sentence")
    _add(options, "--normalization", power, 1.0, "divide log-probabilities by length to this power; 0: no normalization")


def add_model_options(options: Parser) -> None:
    """Add the options that nmt-translate and nmt-validate share: search, batches and device."""
    add_search_options(options)
    _add(options, "--batch-tokens", positive, 2048, "maximum number of source or target pieces per batch, padding included")
    _add(options, "--threads", threads, 0, "CPU threads; 0: OMP_NUM_THREADS, else one per core")
    options.add_argument("--devices", default="auto", help="auto, cpu, cuda or a GPU number (default: auto)")
    options.add_argument("--debug", action="store_true", help="print the stack trace of an error")


def _add(options: Parser, name: str, kind: Callable[[str], float], default: float, help: str) -> None:
    options.add_argument(name, type=kind, default=default, metavar="N", help=f"{help} (default: %(default)s)")
