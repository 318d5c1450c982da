"""The signals that ask training for an end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # what asks training for an end
_REPEATS = 1.0  # seconds


class StopRequest:
    """The first signal that asks for an end, and to whom it is told: whoever listens, also one that begins only later."""

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None
        self._tell: Callable[[signal.Signals], None] | None = None

    def ask(self, wanted: signal.Signals) -> None:
        self._signal = wanted
        if self._tell is not None:
            self._tell(wanted)

    def untell(self) -> None:
        """Nobody listens until the next `tell`."""
        self._tell = None

    def tell(self, listener: Callable[[signal.Signals], None]) -> None:
        """From now on, instead of who listened before."""
        self._tell = listener
        if self._signal is not None:
            listener(self._signal)


class SignalFilter:
    """Tells wishes from signals that repeat one: Slurm sends SIGTERM to its tasks and to srun, which passes it on to them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: float | None = None

    def is_new(self) -> bool:
        """Whether a signal that comes now is a wish of its own: none came within the second before it."""
        now = self._clock()
        repeats = self._last is not None and now - self._last < _REPEATS
        self._last = self._last if repeats else now
        return not repeats


@contextmanager
def handling(ask: Callable[[signal.Signals], None], clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Give the first of SIGINT, SIGTERM and SIGUSR1 to `ask`, for a while; a second wish is a KeyboardInterrupt."""
    asked, wishes = False, SignalFilter(clock)

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if not wishes.is_new():
            return
        if asked:
            raise KeyboardInterrupt
        asked = True
        ask(signal.Signals(number))

    previous = {number: signal.signal(number, handle) for number in ENDS}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
