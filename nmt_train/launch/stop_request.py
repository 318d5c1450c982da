"""The signals that ask training to stop."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

# The signals that ask training to stop, each with what `nmt-train --devices` sends to mpirun instead: mpirun kills its ranks
# soon after SIGINT or SIGTERM, but passes on those in `_MEANT`. SIGHUP comes when the terminal is closed; ranks take it for
# SIGTERM, because mpirun passes no fourth signal on.
PASSED_ON = {
    signal.SIGINT: signal.SIGUSR2,
    signal.SIGTERM: signal.SIGALRM,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGHUP: signal.SIGALRM,
}
_MEANT = {signal.SIGUSR2: signal.SIGINT, signal.SIGALRM: signal.SIGTERM, signal.SIGUSR1: signal.SIGUSR1}
_REPEATS = 1.0  # seconds after a request within which further signals repeat it


class StopRequest:
    """Keeps the signal that asks training to stop, and passes it to the listener, even to one that is set only later."""

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None
        self._tell: Callable[[signal.Signals], None] | None = None

    def ask(self, wanted: signal.Signals) -> None:
        self._signal = wanted
        if self._tell is not None:
            self._tell(wanted)

    def untell(self) -> None:
        """Remove the listener until the next `tell`."""
        self._tell = None

    def tell(self, listener: Callable[[signal.Signals], None]) -> None:
        """Set the listener in place of the previous one, and pass it a signal that has already come."""
        self._tell = listener
        if self._signal is not None:
            listener(self._signal)


class SignalFilter:
    """Distinguishes new requests from repeats: Slurm sends SIGTERM to its tasks and to srun, which forwards it to them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: float | None = None

    def is_new(self) -> bool:
        """Whether a signal that comes now is a new request: it is the first, or the last request was at least a second ago."""
        now = self._clock()
        repeats = self._last is not None and now - self._last < _REPEATS
        self._last = self._last if repeats else now
        return not repeats


@contextmanager
def handled_by(handler: Callable[[int, FrameType | None], None], more: Iterable[signal.Signals] = ()) -> Iterator[None]:
    """In this context, `handler` handles the signals that ask for a stop, and `more`. With nohup, SIGHUP remains ignored."""
    numbers = {*PASSED_ON, *more}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def handling(ask: Callable[[signal.Signals], None], clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """In this context, pass the first SIGINT, SIGTERM, SIGHUP or SIGUSR1 to `ask`, also one that mpirun has passed on.

    A second request raises KeyboardInterrupt.
    """
    asked, wishes = False, SignalFilter(clock)

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if not wishes.is_new():
            return
        if asked:
            raise KeyboardInterrupt
        asked = True
        ask(_MEANT.get(signal.Signals(number), signal.Signals(number)))

    with handled_by(handle, _MEANT):
        yield
