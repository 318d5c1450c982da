"""The style of all figures: a color per mode, labels at the ends of lines instead of a legend, SVG that is reproducible."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from nmt_train.common.errors import UserError

# Three colors that color-blind readers distinguish (near those of Okabe and Ito 2008); all else is gray or black. A color is an
# idea: blue sends all that is computed, green sends parts of it to a server, orange takes local steps.
BLUE, ORANGE, GREEN, INK, CONTEXT, PALE = "#005a9c", "#d55e00", "#009068", "#222222", "#767676", "#dddddd"
_DASHED, _DOTTED, _MIXED = (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 1.5, 1, 1.5))
_LOOKS: dict[str, tuple[str, Any]] = {
    "single": (INK, "-"), "low-bit": (BLUE, "-"), "sync": (BLUE, _DASHED), "overlap": (BLUE, _MIXED),
    "vanilla": (BLUE, _DOTTED), "sparse-local": (ORANGE, "-"), "sparse-local-async": (ORANGE, _DASHED),
    "sparse-overlap": (GREEN, "-"), "sparse": (GREEN, _DASHED), "thesis-sparse-overlap": (GREEN, _MIXED),
    "thesis-sparse": (GREEN, _DOTTED),
}  # fmt: skip
# One color per task, the same in every timeline.
TASK_COLORS = {
    "forward": "#4e79a7", "backward": "#f28e2b", "update": "#59a14f", "sync": "#e15759", "waiting": "#d4d4d4",
    "receive gradients": "#76b7b2", "send parameters": "#b07aa1", "send gradients": "#b6dbd8", "receive parameters": "#dcc2d4",
    "receive sums": "#76b7b2", "send means": "#b07aa1", "send sums": "#b6dbd8", "receive means": "#dcc2d4", "encode": "#edc948",
    "receive changes": "#76b7b2", "send changes": "#b6dbd8", "decode": "#9c755f", "swap": "#bab0ac", "validate": "#86bcb6",
}  # fmt: skip


def look(mode: str) -> dict[str, Any]:
    """Color and line style of a mode, in every figure; modes that are not highlighted are gray."""
    color, line = _LOOKS.get(mode, (CONTEXT, "-"))
    return {"color": color, "linestyle": line}


def new_figure(width: float, height: float, title: str = "", columns: int = 1) -> tuple[Any, Any]:
    """Create a figure (size in inches) with one pair of axes, or an array of `columns` pairs; this needs no display."""
    os.environ["MPLBACKEND"] = "agg"  # that of a notebook may not be installed here, and matplotlib would refuse it
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")  # on dark pages, too
    FigureCanvasAgg(figure)
    if title:
        title = textwrap.fill(title, int(10.5 * width))
        figure.suptitle(title, x=0.012, ha="left", fontsize=11, fontweight="bold", color=INK)
    every = figure.subplots(1, columns, squeeze=False, sharey=columns > 1)[0]
    for axes in every:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color=PALE, linewidth=0.6)
        axes.set_axisbelow(True)
    return figure, every if columns > 1 else every[0]


def log_ticks(axes: Any, which: str, places: Sequence[float]) -> None:
    """Make the axis `which` (x or y) logarithmic, with ticks at `places` only."""
    axes.set(**{f"{which}scale": "log"})
    axis = getattr(axes, f"{which}axis")
    axis.set_ticks(places, labels=[f"{place:g}" for place in places])
    axis.set_ticks([], minor=True)


def label_ends(axes: Any, names: Mapping[Any, str]) -> None:
    """Write the name of each line beside the axes, near where it ends or leaves them; names do not overlap.

    Lines outside the axes get no name. Call this last: limits and scales must not change afterwards.
    """
    axes.figure.draw_without_rendering()  # the layout gives the height of the axes
    ends = {line: end for line in names if (end := _last_visible(axes, line))}
    gap = 1.25 * 9 * axes.figure.dpi / 72 / axes.bbox.height
    heights = spread_apart([height for _, height in ends.values()], gap, 0.0, 1.0)
    for (line, end), height in zip(ends.items(), heights, strict=True):
        pointer = {"arrowstyle": "-", "color": line.get_color(), "linewidth": 0.6, "alpha": 0.6, "shrinkA": 0, "shrinkB": 0}
        axes.annotate(
            names[line], end, (1.03, height), "axes fraction", "axes fraction", pointer, annotation_clip=False,
            va="center", ha="left", fontsize=9, color=line.get_color(),
        )  # fmt: skip


def _last_visible(axes: Any, line: Any) -> tuple[float, float] | None:
    """Where a line ends or leaves the axes, as fractions of their width and height; None: it is outside."""
    points = axes.transAxes.inverted().transform(axes.transData.transform(line.get_xydata())).tolist()
    seen = [number for number, point in enumerate(points) if all(-1e-6 <= its <= 1 + 1e-6 for its in point)]
    if not seen:
        return None
    here, there = points[seen[-1]], points[min(seen[-1] + 1, len(points) - 1)]
    shares = [((to > 1) - of) / (to - of) for of, to in zip(here, there, strict=True) if not 0 <= to <= 1 and to != of]
    share = max(0.0, min([1.0, *shares]))  # of the way to the next point, where the line crosses the edge
    return here[0] + share * (there[0] - here[0]), here[1] + share * (there[1] - here[1])


def spread_apart(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The nearest places (least squares) in the same order, between `low` and `high`, at least `gap` apart if there is room."""
    gap = min(gap, (high - low) / max(1, len(places) - 1))
    order = sorted(range(len(places)), key=lambda index: places[index])
    blocks: list[list[float]] = []  # neighbors that touch: their places without the gaps
    for number, index in enumerate(order):
        blocks.append([places[index] - number * gap])
        while len(blocks) > 1 and fmean(blocks[-2]) > fmean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    wanted = [fmean(block) for block in blocks for _ in block]
    most = high - gap * (len(order) - 1)
    found = {index: min(max(wanted[number], low), most) + number * gap for number, index in enumerate(order)}
    return [found[index] for index in range(len(places))]


def save_figure(figure: Any, output: Path) -> None:
    """Write the figure in the format of the extension of `output`, as the same bytes every time; UserError if it is unknown."""
    from matplotlib import rc_context

    dates: dict[str, dict[str, None]] = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    if output.suffix not in dates:
        raise UserError(f"{output}: unknown extension; use .png, .svg or .pdf")
    output.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "nmt_train", "svg.fonttype": "path"}):  # outlines, so that text needs no font
        figure.savefig(output, dpi=150, metadata=dates[output.suffix])
