"""The signals that ask training for an end."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


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
