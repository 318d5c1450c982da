"""Validation metrics and costs over wall-clock time, one curve per run, as a figure and a CSV table (thesis Figure 4.3b)."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

from nmt_train.common.errors import UserError
from nmt_train.common.metric import COMMAND, METRICS, metric_of
from nmt_train.report.figure import new_figure, save_figure
from nmt_train.run.folder import is_simulation
from nmt_train.run.log import read_metrics

CLOCKS = {"seconds": "wall-clock time", "training_seconds": "training time"}


# Names in the events of log lines, with the titles of their axes.
LOGGED = {"cost": "training cost per piece (nats)", "learning_rate": "learning rate"}
_COLUMNS = ("update", "epoch", "words", *CLOCKS)


def curve(run: Path, metric: str) -> list[dict[str, Any]]:
    """Return the events of a run that include `metric` (of any validation set, or one of LOGGED); UserError if none does."""
    if metric not in LOGGED and metric.partition("@")[0] not in (*METRICS, COMMAND):
        raise UserError(f"metric {metric}: unknown; choose one of {', '.join((*METRICS, COMMAND, *LOGGED))}")
    kind = "train" if metric in LOGGED else "validation"
    needed = {metric, *_COLUMNS}
    events = [event for event in read_metrics(run / "metrics.jsonl") if event["event"] == kind and needed <= event.keys()]
    if not events and kind == "train":
        raise UserError(f"{run}: has no log line yet; let the run continue, or set log.every lower")
    if not events:
        raise UserError(f"{run}: no validation measured {metric}; add it to validation.metrics, or let the run continue")
    return events


def plot(runs: list[Path], metric: str, clock: str, output: Path) -> list[Path]:
    """Plot `metric` of each run over `clock`; write `output` (PNG, SVG or PDF by its extension) and a CSV file beside it.

    metric: as for `curve`. clock: one of CLOCKS.
    """
    curves = {str(run): curve(run, metric) for run in runs}
    longest = max(events[-1][clock] for events in curves.values())
    unit, seconds = ("hours", 3600) if longest > 3 * 3600 else ("minutes", 60) if longest > 180 else ("seconds", 1)
    figure, axes = new_figure(width=7.5, height=4.6)
    names = _short_names(runs)
    lines = {}
    for run, events in curves.items():
        (lines[run],) = axes.plot(
            [event[clock] / seconds for event in events], [event[metric] for event in events],
            marker=None if metric in LOGGED else "o", markersize=3.5, linewidth=1.8,
        )  # fmt: skip
    kinds = {is_simulation(run) for run in runs}
    what = CLOCKS[clock] if kinds == {False} else CLOCKS[clock].replace("wall-clock time", "time")
    where = {frozenset({True}): "virtual ", frozenset({False}): ""}.get(frozenset(kinds), "real and virtual ")
    axes.set_xlabel(f"{where}{what} ({unit})")
    axes.set_ylabel(LOGGED.get(metric) or metric_of(metric).label)
    axes.set_xlim(left=0)
    # As the lines' own labels, names with a leading underscore would be left out. A dollar would begin a formula, and a name
    # need not be UTF-8.
    shown = [os.fsencode(names[run]).decode(errors="replace").replace("$", r"\$") for run in lines]
    axes.legend(lines.values(), shown, frameon=False)
    save_figure(figure, output)
    table = output.with_suffix(".csv")
    with open(table, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:  # names as they are
        writer = csv.writer(file)
        writer.writerow(["run", *_COLUMNS, metric])
        for run, events in curves.items():
            for event in events:
                writer.writerow([run, *(event[key] for key in (*_COLUMNS, metric))])
    return [output, table]


def _short_names(runs: list[Path]) -> dict[str, str]:
    """Map each run to its folder name, or to its full path if two runs have the same folder name."""
    last = [run.resolve().name for run in runs]
    return {str(run): name if last.count(name) == 1 else str(run) for run, name in zip(runs, last, strict=True)}
