"""Validation metrics and costs over wall-clock time, one curve per run, as a figure and a CSV table (thesis Figure 4.3b)."""

from __future__ import annotations

import csv
import os
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from nmt_train.common.errors import UserError
from nmt_train.common.metric import COMMAND, METRICS, metric_of
from nmt_train.report.figure import BLUE, CONTEXT, GREEN, ORANGE, label_ends, look, new_figure, save_figure
from nmt_train.run.folder import is_simulation, mode_of
from nmt_train.run.log import read_metrics

CLOCKS = {"seconds": "wall-clock time", "training_seconds": "training time"}


# Names in the events of log lines, with the titles of their axes.
LOGGED = {"cost": "training cost per word (nats)", "learning_rate": "learning rate"}
_FEW = 12  # points of a curve that are marked
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
    names = {run: shown_name(name) for run, name in _short_names(runs).items()}
    figure, axes = new_figure(7.5, 4.6, _title(curves, names, metric, clock))
    looks, lines = _looks(runs), {}
    for run, events in curves.items():
        (line,) = axes.plot(
            [event[clock] / seconds for event in events], [event[metric] for event in events],
            marker="o" if len(events) <= _FEW else None, markersize=3.5, linewidth=1.8, **looks[run],
        )  # fmt: skip
        lines[line] = names[run]
    kinds = {is_simulation(run) for run in runs}
    what = CLOCKS[clock] if kinds == {False} else CLOCKS[clock].replace("wall-clock time", "time")
    where = {frozenset({True}): "virtual ", frozenset({False}): ""}.get(frozenset(kinds), "real and virtual ")
    axes.set_xlabel(f"{where}{what} ({unit})")
    axes.set_ylabel(LOGGED.get(metric) or metric_of(metric).label)
    axes.set_xlim(left=0)
    if len(lines) > 1:
        label_ends(axes, lines)
    save_figure(figure, output)
    table = output.with_suffix(".csv")
    with open(table, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:  # names as they are
        writer = csv.writer(file)
        writer.writerow(["run", *_COLUMNS, metric])
        for run, events in curves.items():
            for event in events:
                writer.writerow([run, *(event[key] for key in (*_COLUMNS, metric))])
    return [output, table]


def _title(curves: dict[str, list[dict[str, Any]]], names: dict[str, str], metric: str, clock: str) -> str:
    """What to see: the last value of a run, or which of several runs has the best value of a metric."""
    if len(curves) == 1:
        ((run, events),) = curves.items()
        return f"{names[run]}: {metric} {events[-1][metric]:.3g} after {events[-1][clock]:,.0f} s"
    if metric in LOGGED:
        return f"{metric.replace('_', ' ').capitalize()} of {len(curves)} runs"
    choose = min if metric_of(metric).lower_is_better else max
    run, best = choose(((run, choose(event[metric] for event in its)) for run, its in curves.items()), key=lambda its: its[1])
    return f"Best {metric}: {best:.3g} ({names[run]})"


def _looks(runs: list[Path]) -> dict[str, dict[str, Any]]:
    """Of each run: as its mode, if the modes are different and known; else three colors, and gray."""
    modes = {str(run): mode_of(run) for run in runs}
    if "" not in modes.values() and len(set(modes.values())) == len(modes):
        return {run: look(mode) for run, mode in modes.items()}
    colors = chain((BLUE, ORANGE, GREEN), repeat(CONTEXT))
    return {run: {"color": color} for run, color in zip(modes, colors, strict=False)}


def shown_name(name: str) -> str:
    """A name as text of a figure: a dollar would begin a formula, and a name need not be UTF-8."""
    return os.fsencode(name).decode(errors="replace").replace("$", r"\$")


def _short_names(runs: list[Path]) -> dict[str, str]:
    """Map each run to its folder name, or to its full path if two runs have the same folder name."""
    last = [run.resolve().name for run in runs]
    return {str(run): name if last.count(name) == 1 else str(run) for run, name in zip(runs, last, strict=True)}
