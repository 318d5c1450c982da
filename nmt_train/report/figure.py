"""The common style of all figures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nmt_train.common.errors import UserError

# One color per task, the same in every timeline; color-blind readers can distinguish blue and orange.
TASK_COLORS = {
    "forward": "#4e79a7", "backward": "#f28e2b", "update": "#59a14f", "sync": "#e15759",
    "receive gradients": "#76b7b2", "send parameters": "#b07aa1", "send gradients": "#b6dbd8", "receive parameters": "#dcc2d4",
    "receive sums": "#76b7b2", "send means": "#b07aa1", "send sums": "#b6dbd8", "receive means": "#dcc2d4",
    "receive changes": "#76b7b2", "send changes": "#b6dbd8",
    "waiting": "#d4d4d4", "encode": "#edc948", "decode": "#9c755f", "swap": "#bab0ac", "validate": "#86bcb6",
}  # fmt: skip


def new_figure(width: float, height: float) -> tuple[Any, Any]:
    """Create a figure (size in inches) with one pair of axes; this needs no display."""
    os.environ["MPLBACKEND"] = "agg"  # that of a notebook may not be installed here, and matplotlib would refuse it
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="both", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def mark(axes: Any, places: Sequence[float]) -> None:
    """Make the horizontal axis logarithmic, with ticks at `places`."""
    axes.set_xscale("log")
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.set_xticks([], minor=True)


def save_figure(figure: Any, output: Path) -> None:
    """Write the figure in the format given by the extension of `output`; raise UserError if the extension is unsupported."""
    if output.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"{output}: unknown extension; use .png, .svg or .pdf")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150)
