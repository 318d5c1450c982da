"""The thesis's figures 4.1 to 4.19 from our runs: timelines, words/s, and cross-entropy against time."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from nmt_train.report import timeline
from nmt_train.report.figure import CONTEXT, INK, PALE, look, new_figure, save_figure
from reproduce.runs import Missing, Setup, write_csv
from reproduce.thesis import BASE, BOUND, REMOTE, SPARSE, SPARSE_OVERLAP, Results

# By figure: whose trace it shows, and what there is to see.
TRACED = {
    "4.1": (BASE, "One device: backward takes longest"),
    "4.2": (Setup("single", "1x4"), "Four devices of one machine exchange after every batch (two of them are shown)"),
    "4.4": (Setup("vanilla", "2x1"), "vanilla, 2x1: exchanging takes longer than computing"),
    "4.7": (Setup("overlap", "2x1"), "overlap, 2x1: the main thread always computes, another one exchanges"),
    "4.11": (
        Setup(SPARSE, "2x1", REMOTE),
        "thesis-sparse, 2x1: exchanges are short (here also with the own shard, which needs no network)",
    ),
    "4.15": (
        Setup(SPARSE_OVERLAP, "2x1"), "thesis-sparse-overlap, 2x1: the main thread always computes, and exchanges are short",
    ),
}  # fmt: skip
SPANS, WINDOW, _RANKS = "spans.csv", 6.0, 2  # seconds of each timeline, and the ranks in it
_COLUMNS = ["run", "rank", "node", "thread", "name", "start", "end"]


@dataclass(frozen=True)
class _Curves:
    """A figure of convergence.

    title: with a place for how many times as fast as `slow` `quick` is. marks: by setup, how many times as fast as another one
    the thesis says that it converges.
    """

    title: str
    slow: Setup
    quick: Setup
    setups: Sequence[Setup]
    marks: dict[Setup, tuple[Setup, float]] = field(default_factory=dict)


def _of(mode: str, *clusters: str) -> list[Setup]:
    return [Setup(mode, cluster) for cluster in clusters]


def _marks(mode: str, than: Setup, **times: float) -> dict[Setup, tuple[Setup, float]]:
    """times: by cluster, such as x2x1."""
    return {Setup(mode, name.removeprefix("x")): (than, value) for name, value in times.items()}


_CURVES = {
    "4.3b": _Curves(
        "Eight devices of one machine learn {} times as fast as one", BASE, Setup("single", "1x8"),
        _of("single", "1x1", "1x2", "1x4", "1x8"),
    ),
    "4.6": _Curves(
        "vanilla 4x2 learns {} times as fast as one device", BASE, Setup("vanilla", "4x2"),
        [BASE, *_of("vanilla", "2x1", "2x2", "4x1", "4x2")],
    ),
    "4.9": _Curves(
        "overlap 2x1 learns {} times as fast as one device", BASE, Setup("overlap", "2x1"),
        [BASE, *_of("overlap", "2x1", "2x2", "4x1")],
    ),
    "4.10": _Curves(
        "overlap 2x2: {} times as fast with a bound of two steps",
        Setup("overlap", "2x2"), Setup("overlap", "2x2", BOUND),
        [Setup("overlap", name, options) for name in ("2x1", "2x2") for options in ((), BOUND)],
        {Setup("overlap", "2x2", BOUND): (Setup("overlap", "2x2"), 1.4)},
    ),
    "4.13": _Curves(
        "thesis-sparse 4x1 learns {} times as fast as one device", BASE, Setup(SPARSE, "4x1"),
        [BASE, Setup("single", "1x4"), *_of(SPARSE, "2x1", "3x1", "4x1")],
        _marks(SPARSE, BASE, x2x1=1.25, x3x1=1.8, x4x1=2.5),
    ),
    "4.14": _Curves(
        "thesis-sparse 3x2 learns {} times as fast as one machine (1x2)", Setup("single", "1x2"),
        Setup(SPARSE, "3x2"), [*_of("single", "1x2", "1x8"), *_of(SPARSE, "2x2", "3x2", "4x2")],
        {**_marks(SPARSE, Setup("single", "1x2"), x3x2=1.7), **_marks(SPARSE, Setup("single", "1x8"), x4x2=1.0)},
    ),
    "4.17": _Curves(
        "Overlap makes thesis-sparse 4x1 {} times as fast", Setup(SPARSE, "4x1"),
        Setup(SPARSE_OVERLAP, "4x1"), [Setup(mode, name) for name in ("3x1", "4x1") for mode in (SPARSE, SPARSE_OVERLAP)],
    ),
    "4.18": _Curves(
        "Overlap makes thesis-sparse 4x2 {} times as fast", Setup(SPARSE, "4x2"),
        Setup(SPARSE_OVERLAP, "4x2"), [Setup(mode, name) for name in ("3x2", "4x2") for mode in (SPARSE, SPARSE_OVERLAP)],
        {Setup(SPARSE_OVERLAP, name): (Setup(SPARSE, name), 1.3) for name in ("3x2", "4x2")},
    ),
    "4.19": _Curves(
        "thesis-sparse-overlap 7x1 learns {} times as fast as one device", BASE, Setup(SPARSE_OVERLAP, "7x1"),
        [*_of("single", "1x1", "1x4", "1x8"), *_of(SPARSE_OVERLAP, "3x1", "4x2", "7x1")],
        _marks(SPARSE_OVERLAP, BASE, x3x1=2.0, x4x2=4.0, x7x1=5.0),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class _Bars:
    """Two figures of words/s: by devices of each of four machines, and by machines of two devices.

    linear: which of them the thesis calls linear (a, b). third: what it says of a machine of 4x1, relative to 1x1.
    """

    mode: str
    linear: str = ""
    third: bool = False


_BARS = {
    "4.5": _Bars("vanilla", third=True), "4.8": _Bars("overlap", linear="ab"), "4.12": _Bars(SPARSE, linear="b"),
    "4.16": _Bars(SPARSE_OVERLAP, linear="ab"),
}  # fmt: skip
_THESIS = {"marker": "x", "color": INK, "markersize": 7, "markeredgewidth": 1.5}


def draw(found: Results, runs: Path | None, pictures: Path) -> dict[str, str]:
    """Draw all figures whose runs were made into the folder `pictures`; returns their titles.

    runs: the folder of runs, whose traces replace those of spans.csv; None: there is none.
    """
    titles = {}
    spans = _spans(runs, pictures / SPANS)
    for figure, (setup, title) in TRACED.items():
        if its := spans.get(setup.name):
            axis = "simulated time (seconds)"
            save_figure(timeline.draw(its, WINDOW, axis, title), pictures / f"figure-{figure}.svg")
            titles[figure] = title
    for figure, make in _drawings(found).items():
        try:
            title, new = make()
        except Missing:
            continue
        save_figure(new, pictures / f"figure-{figure}.svg")
        titles[figure] = title
    return titles


def _spans(runs: Path | None, path: Path) -> dict[str, list[timeline.Span]]:
    """The first seconds of ten steps of each run with a trace, by its name; also kept in the file `path`."""
    found: dict[str, list[timeline.Span]] = {}
    if path.exists():
        with open(path, encoding="utf-8", newline="") as lines:
            for row in csv.DictReader(lines):
                times = {name: float(row[name]) for name in ("start", "end")}
                its = {"thread": row["thread"], "name": row["name"], "rank": int(row["rank"]), "node": int(row["node"])}
                found.setdefault(row["run"], []).append({**its, **times})
    if runs is not None and (new := dict(_traced(runs))):
        found |= new
        rows = ([name, *(span[key] for key in _COLUMNS[1:])] for name, its in sorted(found.items()) for span in its)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_csv(path, [_COLUMNS, *rows])
    return found


def _traced(runs: Path) -> Iterator[tuple[str, list[timeline.Span]]]:
    for setup, _ in TRACED.values():
        run = runs / "timing" / setup.name
        if (run / "finished").exists():
            spans = timeline.read_spans(run)
            shown = timeline.visible(spans, timeline.window(spans, None, None)[0], WINDOW)
            yield setup.name, [
                {**span, "node": span.get("node", 0), "start": round(span["start"], 4), "end": round(span["end"], 4)}
                for span in shown if span["rank"] < _RANKS
            ]  # fmt: skip


def _drawings(found: Results) -> dict[str, Callable[[], tuple[str, Any]]]:
    """By figure: a function that draws it and returns its title; it raises Missing if a run was not made."""
    drawings: dict[str, Callable[[], tuple[str, Any]]] = {"4.3a": partial(_one_machine, found)}
    for figure, bars in _BARS.items():
        drawings[f"{figure}a"] = partial(_by_devices, found, bars)
        drawings[f"{figure}b"] = partial(_by_machines, found, bars)
    return drawings | {figure: partial(_curves, found, its) for figure, its in _CURVES.items()}


def _one_machine(found: Results) -> tuple[str, Any]:
    devices = (1, 2, 4, 8)
    speeds = [found.speed(Setup("single", f"1x{n}")) for n in devices]
    title = f"Eight devices of one machine: {speeds[3] / speeds[0]:.1f} times the words/s of one"
    figure, axes = new_figure(6.5, 3.9, title)
    _draw_bars(axes, range(4), speeds, CONTEXT)
    _linear(axes, range(3), [n * speeds[0] for n in devices[:3]])
    axes.plot([3], [4.3 * speeds[0]], linestyle="", **_THESIS)
    axes.annotate("the thesis: 4.3x", (3, 4.3 * speeds[0]), (0, 7), textcoords="offset points", ha="center", fontsize=9)
    _axes(axes, devices, "devices", "words/s")
    return title, figure


def _by_devices(found: Results, bars: _Bars) -> tuple[str, Any]:
    devices = (1, 2, 3, 4)
    alone = [found.speed(Setup("single", f"1x{n}")) for n in devices]
    speeds = [found.per_node(bars.mode, f"4x{n}") for n in devices]
    title = f"{bars.mode}: four devices have {speeds[3] / speeds[0]:.1f} times the words/s of one"
    figure, axes = new_figure(6.5, 3.9, title)
    _draw_bars(axes, [n - 0.2 for n in range(4)], alone, PALE, 0.4)
    _draw_bars(axes, [n + 0.2 for n in range(4)], speeds, look(bars.mode)["color"], 0.4)
    if bars.third:
        axes.plot([0.2], [alone[0] / 3], linestyle="", **_THESIS)
        axes.annotate("the thesis: a third", (0.2, alone[0] / 3), (8, 5), textcoords="offset points", fontsize=9)
    if "a" in bars.linear:
        _linear(axes, [n + 0.2 for n in range(4)], [n * speeds[0] for n in devices])
    _axes(axes, devices, "devices of each of four machines (pale: one machine alone)", "words/s of each machine")
    return title, figure


def _by_machines(found: Results, bars: _Bars) -> tuple[str, Any]:
    machines = (1, 2, 3, 4, 5)
    speeds = [found.speed(Setup("single", "1x2")), *(found.speed(Setup(bars.mode, f"{n}x2")) for n in machines[1:])]
    title = f"{bars.mode}: five machines have {speeds[4] / speeds[0]:.1f} times the words/s of one"
    figure, axes = new_figure(6.5, 3.9, title)
    _draw_bars(axes, [0], speeds[:1], PALE)
    _draw_bars(axes, range(1, 5), speeds[1:], look(bars.mode)["color"])
    if "b" in bars.linear:
        first = 2 if bars.mode == SPARSE else 0  # sparse is linear from three machines on
        _linear(axes, range(first, 5), [n * speeds[first] / machines[first] for n in machines[first:]])
    _axes(axes, machines, "machines of two devices (pale: one machine alone)", "words/s of all machines")
    return title, figure


def _draw_bars(axes: Any, places: Sequence[float], heights: Sequence[float], color: str, width: float = 0.6) -> None:
    axes.bar(places, heights, color=color, width=width)
    for place, height in zip(places, heights, strict=True):
        number = axes.annotate(f"{height:,.0f}", (place, 0), (0, 3), textcoords="offset points", ha="center", fontsize=8.5)
        number.set_color(INK if color == PALE else "white")


def _linear(axes: Any, places: Sequence[float], heights: Sequence[float]) -> None:
    """What the thesis calls linear."""
    axes.plot(places, heights, color=CONTEXT, linestyle=":", linewidth=1.5)
    axes.annotate(
        "linear", (places[-1], heights[-1]), (-6, 6), textcoords="offset points", ha="right", fontsize=9, color=CONTEXT
    )


def _axes(axes: Any, names: Sequence[int], below: str, beside: str) -> None:
    axes.set_xticks(range(len(names)), [str(name) for name in names])
    axes.set_xlabel(below)
    axes.set_ylabel(f"{beside} (simulated)")
    axes.grid(axis="x", visible=False)
    axes.margins(y=0.12)


def _curves(found: Results, its: _Curves) -> tuple[str, Any]:
    """The thesis's values are crosses on the line of the target. Thick: more devices."""
    title = its.title.format(f"{mean(found.ratio(its.slow, its.quick).values):.2f}")
    figure, axes = new_figure(6.5, 4.2, title)
    target, names = found.target(), list[tuple[float, float, str, str]]()
    modes = {setup.mode for setup in its.setups} - {"single"}
    for setup in its.setups:
        events = found.curve(setup)
        devices, color = int(setup.cluster[0]) * int(setup.cluster[2]), look(setup.mode)["color"]
        other = (len(modes) > 1 and setup.mode == SPARSE_OVERLAP) or BOUND[0] in setup.options
        times, values = [event["seconds"] / 60 for event in events], [event["cross-entropy"] for event in events]
        axes.plot(times, values, linestyle=(0, (5, 2)) if other else "-", linewidth=0.9 + 0.22 * devices, color=color)
        how = (", overlap" if len(modes) > 1 else ", bound 2") if other else ""
        names.append((times[-1], values[-1], f"{setup.cluster}{how}", color))
        if setup in its.marks:
            base, faster = its.marks[setup]
            where = found.time_to(base, target) / 60 / faster
            axes.plot([where], [target], linestyle="", **_THESIS)
            names.append((where, target, f"{setup.cluster}, thesis", CONTEXT))
    axes.axhline(target, color=INK, linewidth=0.8)
    axes.set_xlim(0, 1.08 * max(time for time, *_ in names))
    axes.set_xlabel("simulated time (minutes); the line is the target" + "; crosses: the thesis" * bool(its.marks))
    axes.set_ylabel("validation cross-entropy per word (nats)")
    _label_below(axes, names, target)
    return title, figure


def _label_below(axes: Any, names: Sequence[tuple[float, float, str, str]], target: float) -> None:
    """Write names below the target, where no line is, in as many rows as they need; each has time, height, text and color."""
    row, letter = 0.23, 0.0115 * axes.get_xlim()[1]  # height of a row, width of half a letter
    rows: list[float] = []  # the right end of the last name in each row
    low = min(target, *(height for _, height, *_ in names if height < target + row))
    for time, height, text, color in sorted(names):
        half = letter * len(text)
        middle = min(max(time, half), axes.get_xlim()[1] - half)
        number = next((number for number, right in enumerate(rows) if right < middle - half), len(rows))
        rows[number : number + 1] = [middle + half]
        place = low - row * (number + 0.9)
        axes.plot([time, middle], [height, place + 0.4 * row], color=color, linewidth=0.6)
        axes.text(middle, place, text, ha="center", va="center", fontsize=9, color=color)
    axes.set_ylim(low - row * (len(rows) + 0.7), 6)


def shown(setup: Setup) -> str:
    return f"{setup.mode} {setup.cluster}" + ", bound 2" * (BOUND[0] in setup.options)
