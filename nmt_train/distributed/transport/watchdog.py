"""Notices that a task of this rank hangs: it waits for nobody, and what it computes does not come to an end."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import nmt_train

_OURS = str(Path(nmt_train.__file__).parent)
_LOOK = 0.5  # seconds between two looks
_DEADLINES, _TIMES = 10, 20


class AwakeClock:
    """Seconds in which this process ran: what all ranks are paused for together makes none of them silent.

    Somebody must look now and then; of more than `longest` seconds between two looks the rest does not count, because the
    process must have stood still.
    """

    def __init__(self, longest: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest, self._clock = longest, clock
        self._last, self._awake = clock(), 0.0
        self._lock = threading.Lock()

    def now(self) -> float:
        with self._lock:
            now = self._clock()
            self._awake += min(now - self._last, self._longest)
            self._last = now
            return self._awake


class Watchdog:
    """Tasks give signs of life. Each is measured against the longest time that any of the rank's has gone without one."""

    def __init__(self) -> None:
        self._now = 0.0  # seconds of watching; while the whole process stands still they do not pass
        self._longest = 0.0
        self._signs: dict[int, float] = {}  # by task: when it last gave one

    def begin(self) -> None:
        """The calling task is to be watched."""
        self._signs[threading.get_ident()] = self._now

    def end(self) -> None:
        self._signs.pop(threading.get_ident(), None)

    def sign(self) -> None:
        """The calling task lives."""
        task, now = threading.get_ident(), self._now
        before = self._signs.get(task, now)
        if before < now:
            self._longest = max(self._longest, now - before)
            self._signs[task] = now

    def hung(self, seconds: float, deadline: float) -> str | None:
        """After so many more seconds: what hangs and where, if something does."""
        self._now += seconds
        limit = max(_DEADLINES * deadline, _TIMES * self._longest)
        for task, sign in list(self._signs.items()):
            if self._now - sign > limit:
                return (
                    f"{_place(task)} has not ended for {self._now - sign:.0f} s, {_DEADLINES} times transport.deadline or"
                    " more, and"
                    f" nothing before took longer than {self._longest:.1f} s; mend the device or the disk that it waits for,"
                    " or raise transport.deadline, then start the same command again"
                )
        return None

    @contextmanager
    def over(self, deadline: float, give_up: Callable[[str], None]) -> Iterator[None]:
        """A context in which the calling task is watched, and all that have begun; give_up is told what hangs."""
        ended = threading.Event()

        def look() -> None:
            last = time.monotonic()
            while not ended.wait(_LOOK):
                now = time.monotonic()
                hung = self.hung(min(now - last, 2 * _LOOK), deadline)
                last = now
                if hung:
                    give_up(hung)
                    return

        self.begin()
        threading.Thread(target=look, name="watch", daemon=True).start()
        try:
            yield
        finally:
            ended.set()
            self.end()


def _place(task: int) -> str:
    """Which line of this package a task is in, or has called from."""
    frames = traceback.extract_stack(sys._current_frames().get(task))
    ours = [frame for frame in frames if frame.filename.startswith(_OURS)] or frames
    frame = ours[-1]
    return f"{frame.name} ({Path(frame.filename).name}, line {frame.lineno})"
