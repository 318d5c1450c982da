"""Named time spans per thread: their durations are always summed; a traced run also writes each span as a line of JSON."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

Span = tuple[str, str, float, float, int]  # name, thread, start and end in seconds on the trace's clock, update


class Clock(Protocol):
    """The clock and threads that spans are measured with: those of the machine, or those of a simulated cluster."""

    def now(self) -> float:
        """Seconds on rank 0's clock (a real one: since 1970), never decreasing. A call is a sign of life for the watchdog."""

    def task(self) -> str:
        """The name of the calling task; a rank's first task is named MainThread."""

    def spend(self, name: str, work: float, seconds: float, parts: float = 1) -> None:
        """Record that `work` of kind `name` took `seconds`; a simulated clock instead advances by the predicted time.

        work: the number of target tokens of a batch or of elements of a vector; parts: see `Trace.span`.
        """


class Trace:
    """Sums the durations of spans per thread and name in `spent`; also stores the spans themselves if `keep` is true."""

    def __init__(self, keep: bool, clock: Clock, settle: Callable[[], None] | None = None) -> None:
        """`settle` waits for a device's queued work, so that stored spans include the time of that work."""
        self._clock, self.update = clock, 0
        self.spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._keep, self._settle = keep, settle if keep else None
        self._spans: list[Span] = []

    @contextmanager
    def span(self, name: str, work: float = 0.0, parts: float = 1) -> Iterator[None]:
        """A context whose duration is recorded under `name` for the current thread.

        work: the amount of work that the span computes, in target tokens of a batch or elements of a vector; 0 if none.
        parts: the work, divided by the part of it in this span, so 2.5 for two fifths.
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
        """Record a span that the caller has timed."""
        self.spent[thread][name] += end - start
        if self._keep:
            self._spans.append((name, thread, start, end, self.update))

    def take(self) -> list[Span]:
        """Return the spans recorded since the last call, and clear them."""
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
