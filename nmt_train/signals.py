"""The signals that ask training for an end."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Wish:
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


@contextmanager
def handling(ask: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Give the first of SIGINT, SIGTERM and SIGUSR1 to `ask`, for a while; a second one is a KeyboardInterrupt."""
    asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        ask(signal.Signals(number))

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
