"""Spans of time with a name and a thread: always added up, and kept one by one, as JSON lines, where a run is traced."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

Span = tuple[str, str, float, float, int]  # name, thread, start and end in seconds on the trace's clock, update


class Clock(Protocol):
    """What spans are measured on: the machine's clock and threads, or those of a simulated cluster."""

    def now(self) -> float:
        """Seconds."""

    def task(self) -> str:
        """The name of what runs: a thread's."""

    def spend(self, name: str, work: float, seconds: float, parts: int = 1) -> None:
        """Work of this kind was done, in so many seconds: where computing takes none, let those pass that it would take, or of
        so many equal parts of it one.
        """


class Trace:
    """Adds up the seconds of every kind of span in `spent`, by thread and name; keeps the spans themselves if `keep`."""

    def __init__(self, keep: bool, clock: Clock, settle: Callable[[], None] | None = None) -> None:
        """`settle` waits for a device's queued work, so that kept spans time the work."""
        self._clock, self.update = clock, 0
        self.spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._keep, self._settle = keep, settle if keep else None
        self._spans: list[Span] = []

    @contextmanager
    def span(self, name: str, work: float = 0.0, parts: int = 1) -> Iterator[None]:
        """A context whose duration is recorded under `name` for the current thread.

        work: how much is computed in it, if anything: target tokens of a batch, elements of a vector. parts: it is one of so
        many spans for that.
        """
        start = self._clock.now()
        try:
            yield
        except BaseException:
            work = 0.0
            raise
        finally:
            if self._settle is not None:
                self._settle()
            if work:
                self._clock.spend(name, work, self._clock.now() - start, parts)
            self.add(name, self._clock.task(), start, self._clock.now())

    def add(self, name: str, thread: str, start: float, end: float) -> None:
        """Record a span that has been timed elsewhere."""
        self.spent[thread][name] += end - start
        if self._keep:
            self._spans.append((name, thread, start, end, self.update))

    def take(self) -> list[Span]:
        """The spans since the last call."""
        spans, self._spans = self._spans, []
        return spans


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
