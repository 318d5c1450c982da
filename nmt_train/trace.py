"""Spans of time with a name and a thread: always added up, and kept one by one, as JSON lines, where a run is traced."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Span = tuple[str, str, float, float, int]  # name, thread, start and end in seconds on the trace's clock, update


class Trace:
    """Adds up the seconds of every kind of span in `spent`, by thread and name; keeps the spans themselves if `keep`."""

    def __init__(self, keep: bool, settle: Callable[[], None] | None = None) -> None:
        """`settle` waits for a device's queued work, so that kept spans time the work."""
        self.now: Callable[[], float] = _Clock().now
        self.update = 0
        self.spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._keep, self._settle = keep, settle if keep else None
        self._spans: list[Span] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """A context whose duration is recorded under `name` for the current thread."""
        start = self.now()
        try:
            yield
        finally:
            if self._settle is not None:
                self._settle()
            self.add(name, threading.current_thread().name, start, self.now())

    def add(self, name: str, thread: str, start: float, end: float) -> None:
        """Record a span that has been timed elsewhere."""
        self.spent[thread][name] += end - start
        if self._keep:
            self._spans.append((name, thread, start, end, self.update))

    def take(self) -> list[Span]:
        """The spans since the last call."""
        spans, self._spans = self._spans, []
        return spans


class _Clock:
    """Seconds since 1970 that never run backwards, so that spans of several starts and hosts lie on one axis."""

    def __init__(self) -> None:
        self._epoch = time.time() - time.perf_counter()

    def now(self) -> float:
        return self._epoch + time.perf_counter()


def write_spans(folder: Path, rank: int, node: int, spans: Iterable[Span]) -> None:
    """Append to `rank<rank>.jsonl`: {"name", "thread", "rank", "node", "start", "end", "update"}."""
    lines = []
    for name, thread, start, end, update in spans:
        line: dict[str, Any] = {"name": name, "thread": thread, "rank": rank, "node": node}
        lines.append(json.dumps(line | {"start": round(start, 6), "end": round(end, 6), "update": update}) + "\n")
    if lines:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"rank{rank}.jsonl", "a", encoding="utf-8") as file:
            file.writelines(lines)
