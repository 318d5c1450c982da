"""Spans of time with a name and a thread, as JSON lines; nothing at all while tracing is off."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

# Seconds since 1970 that never run backwards, so that spans of several starts and hosts lie on one axis.
_EPOCH = time.time() - time.perf_counter()
_NOTHING: AbstractContextManager[None] = nullcontext()


class Trace:
    """Collects spans in memory and appends them to a file when flushed.

    A line is {"name", "thread", "rank", "start", "end", "update"}, times in seconds on `now`'s clock.
    """

    def __init__(
        self,
        path: Path | None,
        rank: int = 0,
        now: Callable[[], float] = lambda: _EPOCH + time.perf_counter(),
        settle: Callable[[], None] | None = None,
    ) -> None:
        """`path`: None switches tracing off; `settle` waits for a device's queued work, so that spans time the work."""
        self._path, self._rank, self._now, self._settle = path, rank, now, settle
        self._spans: list[tuple[str, str, float, float, int]] = []
        self.update = 0

    def span(self, name: str) -> AbstractContextManager[None]:
        """A context whose duration is recorded under `name` for the current thread."""
        return _NOTHING if self._path is None else self._timed(name)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            if self._settle is not None:
                self._settle()
            self._spans.append((name, threading.current_thread().name, start, self._now(), self.update))

    def flush(self) -> None:
        """Append what was collected to the file."""
        if self._path is None or not self._spans:
            return
        spans, self._spans = self._spans, []
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "a", encoding="utf-8") as file:
            for name, thread, start, end, update in spans:
                line: dict[str, Any] = {"name": name, "thread": thread, "rank": self._rank}
                line |= {"start": round(start, 6), "end": round(end, 6), "update": update}
                file.write(json.dumps(line) + "\n")
