"""Detects that a task of this rank hangs: it does not wait for another rank, and its computation does not end."""

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
_LOOK = 0.5  # seconds between two checks
_DEADLINES, _TIMES = 10, 20  # a task hangs if it is silent for both 10 deadlines and 20 times the longest earlier silence


class AwakeClock:
    """Counts the seconds during which this process ran. If all ranks are paused together, none of them appears silent.

    Callers must read the clock regularly. If more than `longest` seconds pass between two reads, only `longest` seconds
    count, because the process must have been suspended.
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
    """Tasks give signs of life. The limit for silence depends on the longest time that any task has gone without a sign."""

    def __init__(self) -> None:
        self._now = 0.0  # seconds of watching, without the time during which the whole process is suspended
        self._longest = 0.0
        self._signs: dict[int, float] = {}  # for each task: the time of its last sign of life

    def begin(self) -> None:
        """Start to watch the calling task."""
        self._signs[threading.get_ident()] = self._now

    def end(self) -> None:
        self._signs.pop(threading.get_ident(), None)

    def sign(self) -> None:
        """Record a sign of life of the calling task."""
        task, now = threading.get_ident(), self._now
        before = self._signs.get(task, now)
        if before < now:
            self._longest = max(self._longest, now - before)
            self._signs[task] = now

    def hung(self, seconds: float, deadline: float) -> str | None:
        """Advance the time by `seconds`; return a text that says which task hangs and where, or None if none does."""
        self._now += seconds
        limit = max(_DEADLINES * deadline, _TIMES * self._longest)
        for task, sign in list(self._signs.items()):
            if self._now - sign > limit:
                return (
                    f"{_place(task)} has not ended for {self._now - sign:.0f} s, at least {_DEADLINES} times"
                    " transport.deadline, and"
                    f" nothing before took longer than {self._longest:.1f} s; check the device or the disk that it waits for,"
                    " or raise transport.deadline, then start the same command again"
                )
        return None

    @contextmanager
    def over(self, deadline: float, give_up: Callable[[str], None]) -> Iterator[None]:
        """A context that watches the calling task and all that called `begin`; calls `give_up` with a text if one hangs."""
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
    """The line of this package that a task is executing, or from which it has called other code."""
    frames = traceback.extract_stack(sys._current_frames().get(task))
    ours = [frame for frame in frames if frame.filename.startswith(_OURS)] or frames
    frame = ours[-1]
    return f"{frame.name} ({Path(frame.filename).name}, line {frame.lineno})"
