"""Draw the spans of a run over time, as in thesis Figure 4.1, or export them for Perfetto."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from nmt_train.common.errors import UserError, unreadable
from nmt_train.report.convergence import shown_name
from nmt_train.report.figure import TASK_COLORS, new_figure, save_figure
from nmt_train.run.folder import is_simulation

Span = dict[str, Any]


def read_spans(run: Path) -> list[Span]:
    """Return all spans of all ranks of a run, sorted by start; raise UserError if the run has no trace or a line is damaged."""
    spans: list[Span] = []
    files = sorted((run / "trace").glob("*.jsonl"))
    for path in files:
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError as error:
            raise UserError(f"{unreadable(path, error)}; check that it can be read") from None
        for number, line in enumerate(lines[:-1], 1):
            try:
                span = json.loads(line)
                times = {"start": float(span["start"]), "end": float(span["end"])}
                texts = {"name": str(span["name"]), "thread": str(span["thread"])}
                spans.append({**span, **times, **texts, "rank": int(span["rank"]), "update": int(span["update"])})
            except (ValueError, KeyError, TypeError):
                raise UserError(f"{path}, line {number}: not a span; delete the line") from None
    if not spans:
        raise UserError(f"{run}: no trace; train with --trace true")
    return sorted(spans, key=lambda span: span["start"])


def plot(run: Path, start: float | None, seconds: float | None, output: Path) -> list[Path]:
    """Draw the spans of `seconds` seconds from `start` (seconds after the first span); None: see `window`.

    Returns [output]. Raises UserError if the run has no trace, or if the window is not inside it.
    """
    spans = read_spans(run)
    first, length = window(spans, start, seconds)
    axis = f"{_clock([run])} time (seconds, from second {first:.1f} of the trace)"
    save_figure(draw(visible(spans, first, length), length, axis), output)
    return [output]


def visible(spans: Sequence[Span], start: float, length: float) -> list[Span]:
    """The spans in a window, whose times count from its beginning. start: seconds after the first span."""
    start += spans[0]["start"]
    moved = [{**span, "start": span["start"] - start, "end": span["end"] - start} for span in spans]
    return [span for span in moved if span["end"] >= 0 and span["start"] <= length]


def draw(spans: Sequence[Span], length: float, axis: str, title: str = "") -> Any:
    """A figure with a row for every thread that does something. spans: those of the window; length: of the window [s]."""
    rows = _rows(spans)
    heights = [1.0 if thread == _WORKER else 0.6 for _, thread in rows]
    places = [before + height / 2 for before, height in zip(accumulate([0.0, *heights]), heights, strict=False)]
    figure, axes = new_figure(9, 1.5 + 0.42 * sum(heights), title)
    seen: dict[str, Any] = {}
    for span in spans:
        row = rows.index((span["rank"], span["thread"]))
        _bar(axes, places[row], 0.72 * heights[row], span, seen)
    nodes = {span["rank"]: span.get("node", 0) for span in spans}
    several, many = len(set(nodes.values())) > 1, len(nodes) > 1
    labels = []
    for rank, thread in rows:
        own = [span for span in spans if (span["rank"], span["thread"]) == (rank, thread)]
        where = f"{f'node {nodes[rank]}, ' if several else ''}{f'rank {rank}, ' if many else ''}"
        labels.append(f"{where}worker: computes {_computes(own, length):.0%}" if thread == _WORKER else thread)
    axes.set_xlabel(axis)
    _finish(figure, axes, places, labels, length, seen)
    return figure


def compare(runs: Sequence[Path], seconds: float | None, output: Path) -> list[Path]:
    """Draw what the worker of rank 0 does, one row per run, in windows of the same length.

    seconds: the length; None: two steps of the slowest run. Returns [output]. Raises UserError if a run has no trace.
    """
    traces = {run: read_spans(run) for run in runs}
    slowest = max(window(spans, None, None)[1] for spans in traces.values())
    length = 2 / _STEPS * slowest if seconds is None else seconds
    if length <= 0:
        raise UserError(f"--seconds {length:g}: the window must be longer than zero")
    figure, axes = new_figure(9, 1.5 + 0.5 * len(runs), "How much of the time the first worker of each run computes")
    labels, seen = [], dict[str, Any]()
    for row, (name, spans) in enumerate(zip(_short([run.resolve().name for run in traces]), traces.values(), strict=True)):
        lead, shown = _rows(spans)[0], visible(spans, window(spans, None, None)[0], length)
        own = [span for span in shown if (span["rank"], span["thread"]) == lead]
        for span in own:
            _bar(axes, row, 0.62, span, seen)
        labels.append(f"{shown_name(name)}: computes {_computes(own, length):.0%}")
    axes.set_xlabel(f"{_clock(runs)} time (seconds)")
    _finish(figure, axes, range(len(runs)), labels, length, seen)
    save_figure(figure, output)
    return [output]


def _short(names: list[str]) -> list[str]:
    """The names without the parts, after hyphens, with which all of them end."""
    parts = [name.split("-") for name in names]
    while len(parts) > 1 and min(map(len, parts)) > 1 and len({its[-1] for its in parts}) == 1:
        parts = [its[:-1] for its in parts]
    return ["-".join(its) for its in parts]


def _computes(spans: list[Span], length: float) -> float:
    """The share of a window that these spans spend in forward and backward passes."""
    passes = (span for span in spans if span["name"] in ("forward", "backward"))
    return sum(max(0.0, min(span["end"], length) - max(span["start"], 0.0)) for span in passes) / length


def _bar(axes: Any, place: float, height: float, span: Span, seen: dict[str, Any]) -> None:
    """Draw a span of the window. seen: a bar of every name, for the legend."""
    color = TASK_COLORS.get(span["name"], "#9c9c9c")
    seen[span["name"]] = axes.barh(
        place, span["end"] - span["start"], left=span["start"], height=height, color=color,
        edgecolor=color, linewidth=0.5,  # so that short spans are visible
    )  # fmt: skip


def _clock(runs: Sequence[Path]) -> str:
    return "virtual" if all(map(is_simulation, runs)) else "wall-clock"


def _finish(figure: Any, axes: Any, places: Sequence[float], labels: list[str], length: float, seen: dict[str, Any]) -> None:
    """Add the names of the rows, and the legend: bars are too short for labels of their own."""
    axes.set_yticks(places, labels)
    axes.set_ylim(max(places, default=0) + 0.5, min(places, default=0) - 0.5)
    axes.set_xlim(0, length)
    axes.grid(axis="y", visible=False)
    names = sorted(seen, key=lambda name: ([*TASK_COLORS, name].index(name), name))
    columns = min(len(names), 5)
    figure.legend([seen[name] for name in names], names, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


_STEPS = 10  # in a window by default; as many come before it, to warm up caches and allocators


def window(spans: list[Span], start: float | None, seconds: float | None) -> tuple[float, float]:
    """Return start and length: by default, ten steps without a validation between them, or as many as a short run has."""
    origin, end = spans[0]["start"], max(span["end"] for span in spans)
    rank, thread = _rows(spans)[0]
    lead = [span for span in spans if (span["rank"], span["thread"]) == (rank, thread)]
    steps = [span["start"] - origin for span in lead if span["name"] == lead[0]["name"]]
    if start is None:
        first, count = _quiet([after - before for before, after in pairwise(steps)])
        start, seconds = steps[first], seconds or (steps[first + count] - steps[first] if count else None)
    if not 0 <= start < end - origin:
        raise UserError(f"--start {start:g}: the trace is {end - origin:.1f} seconds long; choose a second inside it")
    if seconds is None:
        later = [step for step in steps if step > start]
        seconds = (later[min(_STEPS, len(later)) - 1] - start) if later else end - origin - start
    if seconds <= 0:
        raise UserError(f"--seconds {seconds:g}: the window must be longer than zero")
    return start, seconds


def _quiet(gaps: list[float]) -> tuple[int, int]:
    """The first step of the window and its number of steps; gaps: the times between the starts of steps."""
    for count in range(min(_STEPS, len(gaps)), 0, -1):
        last = len(gaps) - count
        warm = min(_STEPS, last)
        for first in (*range(warm, last + 1), *reversed(range(warm))):
            if max(gaps[first : first + count]) <= 3 * statistics.median(gaps):
                return first, count
    return 0, 0


_WORKER = "MainThread"
_ORDER = (_WORKER, "background task", "sums of factors", "node", "server", "network in", "network out")


def _rows(spans: Sequence[Span]) -> list[tuple[int, str]]:
    """Return rank and thread of every row: for each rank, the worker thread first, then the threads that serve it."""

    def place(row: tuple[int, str]) -> tuple[int, int, str]:
        return row[0], _ORDER.index(row[1]) if row[1] in _ORDER else len(_ORDER), row[1]

    return sorted({(span["rank"], span["thread"]) for span in spans}, key=place)


def _thread(name: str) -> str:
    return "worker" if name == _WORKER else name


def chrome(run: Path, output: Path) -> list[Path]:
    """Write the spans in the Trace Event format of Perfetto and chrome://tracing, with times in microseconds."""
    spans = read_spans(run)
    rows = _rows(spans)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in sorted({r for r, _ in rows})
    ]
    threads = {row: number for number, row in enumerate(rows)}
    for (rank, thread), number in threads.items():
        events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": _thread(thread)}})
    for span in spans:
        events.append({
            "ph": "X", "name": span["name"], "pid": span["rank"], "tid": threads[span["rank"], span["thread"]],
            "ts": round(span["start"] * 1e6), "dur": round((span["end"] - span["start"]) * 1e6),
            "args": {"update": span["update"]},
        })  # fmt: skip
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
    return [output]
