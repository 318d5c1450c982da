"""Pictures that belong to no page of results: the architecture, predicted against measured words/s, a kill and its recovery."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import median
from typing import Any

from nmt_train.report.figure import BLUE, CONTEXT, GREEN, INK, ORANGE, PALE, label_ends, log_ticks, new_figure, save_figure

# What a strategy is made of, by family: what it is, and its choices.
_FAMILIES = (
    ("replicas", BLUE, "every rank has all parameters",
     ("cadence: every step in buckets, pipelined, local steps",
      "reducer: ring, butterfly, library, powersgd, low-bit, all-gather")),
    ("server", GREEN, "parameters are sharded over the ranks",
     ("cadence: every step, overlapped, local steps, downpour", "codecs of both directions, update rule of the shards")),
    ("peers", ORANGE, "ranks send their changes to all others", ("codec: Strom's thresholds",)),
    ("alone", INK, "one rank", ()),
)  # fmt: skip


def architecture(output: Path) -> None:
    """Draw how a configuration becomes a strategy, and what the training loop asks of it."""
    figure, axes = new_figure(9, 4.4, "A configuration becomes a plan, the plan a strategy, which exchanges gradients")
    axes.set(xlim=(-0.5, 100.5), ylim=(0, 50))
    axes.axis("off")
    _box(axes, (0, 36, 17, 9), INK, "configuration,\nmode, ranks")
    _box(axes, (28, 36, 13, 9), INK, "plan")
    _box(axes, (0, 5, 41, 12), INK, "training loop:\nbatch, loss, strategy.backward, strategy.step")
    _box(axes, (50, 0.5, 50, 49), PALE, "")
    _arrow(axes, (17, 40.5), (28, 40.5), "resolve")
    _arrow(axes, (41, 40.5), (50, 40.5), "build")
    _arrow(axes, (34.5, 36), (34.5, 29), "")
    axes.text(34.5, 28, "reasons in the log,\nadviser, simulator", ha="center", va="top", fontsize=9, color=CONTEXT)
    _arrow(axes, (41, 11), (50, 11), "calls")
    axes.text(51.5, 48, "strategy: one of four families", fontsize=10, fontweight="bold", color=INK, va="top")
    top = 44.5
    for name, color, what, choices in _FAMILIES:
        height = 5.5 + 3.2 * len(choices)
        _box(axes, (51.5, top - height, 47, height), color, "")
        axes.text(53, top - 1.5, name, fontsize=10, fontweight="bold", color=color, va="top")
        axes.text(63, top - 1.5, what, fontsize=9, color=INK, va="top")
        axes.text(53, top - 5.2, "\n".join(choices), fontsize=8.5, color=INK, va="top", linespacing=1.3)
        top -= height + 1.5
    save_figure(figure, output)


def _box(axes: Any, place: tuple[float, float, float, float], color: str, text: str) -> None:
    """place: left, bottom, width, height."""
    from matplotlib.patches import Rectangle

    left, bottom, width, height = place
    axes.add_patch(Rectangle((left, bottom), width, height, facecolor="white", edgecolor=color, linewidth=1.5))
    axes.text(left + width / 2, bottom + height / 2, text, ha="center", va="center", fontsize=9.5, color=color)


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], text: str) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": INK, "linewidth": 1.2})
    axes.text((start[0] + end[0]) / 2, end[1] + 1, text, ha="center", fontsize=9, style="italic", color=INK)


def predicted(adviser: Path, output: Path) -> None:
    """Draw measured against predicted words/s of every mode on virtual hosts; of several measurements, the median."""
    found: dict[tuple[str, ...], list[float]] = {}
    for row in _rows(adviser):
        key = (row["case"], row["mode"], row["settings"], row["machines"], row["predicted"])
        found.setdefault(key, []).append(float(row["measured"]))
    errors = [abs(float(key[-1]) / median(values) - 1) for key, values in found.items()]
    title = f"Predicted words/s are off by {median(errors):.0%} in the median, by {max(errors):.0%} at most"
    figure, axes = new_figure(6, 4.6, title)
    low, high = 1000.0, 14000.0
    (same,) = axes.plot([low, high], [low, high], color=INK, linewidth=1)
    names = {same: "equal"}
    for factor, name in ((1.2, "20% more"), (0.8, "20% less")):
        (line,) = axes.plot([low, high], [factor * low, factor * high], color=CONTEXT, linewidth=0.8, linestyle=(0, (5, 2)))
        names[line] = name
    groups = (("10mbit", ORANGE, "o"), ("100mbit", BLUE, "s"), ("1000mbit", GREEN, "^"))
    for number, (rate, color, marker) in enumerate(groups):
        its = [(float(key[-1]), median(values)) for key, values in found.items() if f", {rate}" in key[0]]
        axes.plot(*zip(*its, strict=True), marker, markersize=5, color=color, alpha=0.75, markeredgewidth=0)
        axes.plot([0.05], [0.94 - 0.07 * number], marker, markersize=5, color=color, transform=axes.transAxes)
        text = f"{rate.removesuffix('mbit')} Mbit/s"
        axes.text(0.08, 0.94 - 0.07 * number, text, transform=axes.transAxes, fontsize=9, va="center", color=color)
    for axis in "xy":
        log_ticks(axes, axis, (1000, 2000, 5000, 10000))
    axes.set(xlim=(low, high), ylim=(low, high))
    axes.set_xlabel("predicted words/s (2 to 4 virtual hosts)")
    axes.set_ylabel("measured words/s")
    label_ends(axes, names)
    save_figure(figure, output)


def kill(record: Path, output: Path) -> None:
    """Draw the words/s of each rank against time, on top of each other; record: the file of scripts/record_kill."""
    speeds: dict[str, dict[float, float]] = {}
    moments: dict[str, float] = {}
    for row in _rows(record):
        if row["words/s"]:
            speeds.setdefault(row["what"], {})[float(row["seconds"])] = float(row["words/s"])
        else:
            moments[row["what"]] = float(row["seconds"])
    (killed, at), (_, again) = sorted(moments.items(), key=lambda item: item[1])
    times = sorted({time for its in speeds.values() for time in its})[5:]  # at first, counters of ranks begin at other moments
    figure, axes = new_figure(8, 3.8, f"{killed.capitalize()}: the others continue after {again - at:.1f} s")
    below = [0.0] * len(times)
    for (rank, its), color in zip(sorted(speeds.items()), (BLUE, GREEN, ORANGE), strict=True):
        shown = _smooth([its.get(time, 0.0) for time in times])
        top = [low + value for low, value in zip(below, shown, strict=True)]
        axes.fill_between(times, below, top, color=color, alpha=0.8, linewidth=0, step="pre")
        axes.text(
            times[10], (below[10] + top[10]) / 2, rank, fontsize=9, fontweight="bold", color="white", ha="center", va="center"
        )
        below = top
    axes.axvline(at, color=INK, linewidth=1.2)
    axes.annotate("SIGKILL", (at, 1), (4, -2), axes.get_xaxis_transform(), "offset points", va="top", fontsize=9, color=INK)
    axes.set(xlim=(times[0], times[-1]), ylim=(0, 1.15 * max(below)))
    axes.set_xlabel("wall-clock time (seconds); three ranks on two cores of one machine")
    axes.set_ylabel("words/s of all ranks")
    axes.grid(color=PALE)
    save_figure(figure, output)


def _smooth(values: list[float]) -> list[float]:
    """Medians of three: a log line that waits for a report makes the next one count more."""
    inner = [median(values[number - 1 : number + 2]) for number in range(1, len(values) - 1)]
    return [values[0], *inner, values[-1]]


def _rows(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))
