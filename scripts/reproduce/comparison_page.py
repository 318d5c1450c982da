"""The page of one place of the comparison: tables and a figure of what the trials found."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from nmt_train.common.errors import UserError
from nmt_train.report.figure import new_figure, save_figure
from reproduce.places import FAST, FASTEST, JITTER, MACHINES, NETWORKS, PLACES, STRAGGLER, THESIS_4X2, THESIS_7X1
from reproduce.runs import crossing
from reproduce.systems import ALONE, IDEAL, SYSTEMS
from reproduce.trials import Trial, Trials

# What other software offers. In pictures, every system has the same color.
RIVALS = ("sync bf16", "powersgd", "local-sgd", "diloco", "strom")
_COLORS = {
    "low-bit": "C0", "powersgd": "C1", "sparse-local": "C2", "strom": "C3", "sparse-local-async, tiles": "C4",
    "sparse-local-async": "C5", "sparse-overlap": "C6", "sync bf16": "C7", "local-sgd": "C8", "diloco": "C9",
    "pipe": "#393b79", "vanilla": "#637939", "thesis-sparse": "#843c39", ALONE: "black", IDEAL: "black",
}  # fmt: skip
_OTHER = "#888888"
_TITLES = {
    STRAGGLER: "a slow machine, 1 Gbit/s", JITTER: "jitter, 1 Gbit/s",
    THESIS_4X2: "the thesis's four machines of two devices", THESIS_7X1: "the thesis's seven machines",
    **{place: f"Tatoeba, {machines} machine{'s' * (machines > 1)}, 1 Gbit/s" for machines, place in MACHINES.items()},
}  # fmt: skip
_LABELS = {"sync bf16": "all-reduce (sync) in bf16"}
_ABOUT = """# Comparison: {title}

From trials.csv, by `scripts/tune`. Runs of {words:g}M words; [columns, settings and marks](protocol.md#columns-and-settings).

"""


def write(trials: Trials, place: str, folder: Path) -> Path:
    """Write the page and its figure into `folder`; returns the page. UserError without trials of one machine."""
    page = page_of(place, folder)
    name = page.stem
    text = _ABOUT.format(title=_TITLES.get(place, place), words=_alone(trials, place).words / 1e6) + table(trials, place)
    late = times(trials, place)
    if late:
        text += f"\n## Time to the late target\n\n{late}"
    several = (trials.tuned(system, place) for system in SYSTEMS if system != ALONE)
    if any(trials.longer(tuned) for tuned in several if tuned):
        text += f"\n## Longer runs\n\n{table(trials, place, longer=True)}"
    _draw(trials, place, folder / f"{name}.png")
    text += f"\n![cross-entropy against time]({name}.png)\n"
    page.write_text(text, encoding="utf-8")
    return page


def page_of(place: str, folder: Path) -> Path:
    """The page of one place."""
    return folder / f"results-{place.replace(' ', '').replace('/', '')}.md"


def marked(values: Sequence[float], decimals: int = 2) -> str:
    """The mean and, in brackets, the range of several seeds; a single run is marked with (1)."""
    return f"{mean(values):.{decimals}f} ({f'{min(values):.{decimals}f}-{max(values):.{decimals}f}' if len(values) > 1 else 1})"


def table(trials: Trials, place: str, longer: bool = False) -> str:
    """A Markdown table of the best settings of each system at its greatest length, as the mean and range over its seeds.

    Seed 0, with which the settings were chosen, counts only if there is no other. longer: of the systems that were trained
    much longer with these settings. Settings are left out where they are those of the same system at 1 Gbit/s.
    """
    lines = [
        "| system | cross-entropy | words/s | efficiency | speedup | at most | searched | settings |",
        "|---" * 8 + "|",
    ]
    alone = _alone(trials, place)
    for system in SYSTEMS:
        tuned = trials.tuned(system, place)
        if tuned is None:
            continue
        same = trials.longer(tuned) if longer else trials.seeds(tuned) or [tuned]
        if not same:
            continue
        there = trials.tuned(system, FAST) if place != FAST else None
        settings = () if there and there.settings == tuned.settings else tuned.settings
        words = f", {same[0].words / 1e6:g}M words" * (same[0].words != alone.words)
        columns = (
            system + words, marked([trials.end(trial) for trial in same], decimals=3).removesuffix(" (1)"),
            f"{mean(trials.pace(trial) / trials.pace(alone) for trial in same):.2f}",
            f"{mean(trials.data_efficiency(trial) for trial in same):.2f}",
            marked([trials.speedup(trial) for trial in same]), f"{mean(map(trials.at_most, same)):.2f}",
            trials.tuning(tuned), " ".join(settings),
        )  # fmt: skip
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"


def _alone(trials: Trials, place: str) -> Trial:
    """The best run of one machine. UserError without its trials at two lengths."""
    alone = trials.tuned(ALONE, place)
    if alone is None or len(trials.alone(place)) < 2:
        raise UserError(
            f"{trials.path}: has no trials of {ALONE} at two lengths; run scripts/tune '{ALONE}' --place"
            f" '{PLACES[place].alone}' first"
        )
    return alone


def times(trials: Trials, place: str) -> str:
    """A Markdown table of the times to the late target, as mean and range over the seeds; empty without such runs."""
    alone, lines = trials.tuned(ALONE, place), list[str]()
    if alone is None or not trials.seeds(alone):
        return ""
    target = trials.target(place)
    ends = {trial: float(trials.found[trial][-1]["seconds"]) for trial in trials.seeds(alone)}
    base = mean(min(crossing(trials.found[trial], target), end) for trial, end in ends.items())  # measured as for all others
    for system in SYSTEMS:
        tuned = trials.tuned(system, place) if system != ALONE else None
        if tuned is not None and (runs := trials.to_target(tuned)):
            found = [crossing(trials.found[trial], target) for trial in runs]
            missed = sum(map(math.isinf, found))
            said = f"missed by {missed} of {len(found)} runs" if missed else marked(found, decimals=0)
            speedup = "" if missed else marked([base / time for time in found])
            lines.append(f"| {system} | {runs[0].words / 1e6:g}M | {said} | {speedup} |")
    head = [
        f"Cross-entropy {target:.3f}, which one machine reaches after {base:.0f} s.", "",
        "| system | words | seconds | speedup |",
        "|---|---|---|---|",
    ]  # fmt: skip
    return "\n".join([*head, *lines]) + "\n" if lines else ""


def _complete(trials: Trials, place: str) -> dict[str, Trial]:
    """The best trial of each system whose tuning has come to runs as long as those of one machine."""
    alone = trials.tuned(ALONE, place)
    tuned = {system: trials.tuned(system, place) for system in SYSTEMS}
    return {system: trial for system, trial in tuned.items() if trial and alone and trial.words == alone.words}


def overview(trials: Trials, output: Path) -> None:
    """Draw how many times sooner than one machine each system learns the same model, on each network.

    A line is the range of several seeds; a pale bar is a single run. Rivals are hatched.
    """
    figure, axes = new_figure(width=12, height=4.4)
    networks = [place for place in (*reversed(NETWORKS), FASTEST) if len(trials.alone(place)) > 1]
    found: list[dict[str, list[float]]] = []
    for network in networks:
        complete = _complete(trials, network).items()
        found.append({system: trials.speedups(trial) for system, trial in complete if system not in (ALONE, IDEAL)})
    width = 0.9 / max(1, *map(len, found))
    for place, its in enumerate(found):
        for number, (system, values) in enumerate(sorted(its.items(), key=lambda item: -mean(item[1]))):
            where, height, top = place + (number - (len(its) - 1) / 2) * width, mean(values), max(values)
            look = {"color": _COLORS.get(system, _OTHER), "hatch": "//" if system in RIVALS else "", "edgecolor": "white"}
            label = f"{_LABELS.get(system, system)}{' (rival)' * (system in RIVALS)}"
            axes.bar(where, height, width=0.9 * width, alpha=1 if len(values) > 1 else 0.5, label=label, **look)
            if len(values) > 1:
                axes.errorbar(where, height, [[height - min(values)], [top - height]], color="black", linewidth=0.8, capsize=2)
            axes.text(where, top, f"{height:.1f}", ha="center", va="bottom", fontsize=6.5)
    axes.axhline(1, color="black", linewidth=0.8)
    if (ideal := trials.tuned(IDEAL, FAST)) is not None:
        best = mean(trials.speedups(ideal))
        axes.axhline(best, color="black", linewidth=0.8, linestyle="--")
        words, place = "ideal sync: all-reduce on a network without limits", axes.get_yaxis_transform()
        axes.text(0.01, best, words, transform=place, va="bottom", fontsize=8)
    axes.set_xticks(range(len(networks)), networks)
    axes.set_xlabel("network between the four machines")
    axes.set_ylabel("speedup over one machine")
    axes.grid(axis="x", visible=False)
    named = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(named.values(), named, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    save_figure(figure, output)


def scaling(trials: Trials, output: Path) -> None:
    """Draw how many times sooner each system learns the same model with 2 to 16 machines, in runs as long as one machine's."""
    by_system: dict[str, dict[int, list[float]]] = {}
    complete = {machines: _complete(trials, place) for machines, place in MACHINES.items()}
    for system, machines in itertools.product(SYSTEMS, MACHINES):
        if system != ALONE and (tuned := complete[machines].get(system)):
            by_system.setdefault(system, {})[machines] = trials.speedups(tuned)
    if not by_system:
        return
    most = max(itertools.chain(*by_system.values()))
    figure, axes = new_figure(width=6, height=4)
    for system, found in by_system.items():
        color, line = _COLORS.get(system, _OTHER), "--" if system == IDEAL else "-"
        points = {1: 1.0} if len(found) > 1 else {}  # no line through a single point
        points |= {machines: mean(values) for machines, values in found.items()}
        axes.plot([*points], [*points.values()], marker="o", color=color, linestyle=line, label=system)
        axes.vlines([*found], [*map(min, found.values())], [*map(max, found.values())], color=color, linewidth=0.8)
    for share, line in ((1.0, "-"), (0.6, ":")):
        axes.plot([1, most], [share, share * most], color="#bbbbbb", linestyle=line, label=f"{share:g} per machine")
    axes.set_xticks([machines for machines in MACHINES if machines <= most])
    axes.set_xlabel("machines")
    axes.set_ylabel("speedup over one machine")
    axes.legend(frameon=False)
    save_figure(figure, output)


def _draw(trials: Trials, place: str, output: Path) -> None:
    """Cross-entropy against simulated time: one run of each system that has been tuned to the end."""
    figure, axes = new_figure(width=8, height=4.8)
    for system, tuned in _complete(trials, place).items():
        shown: Trial = next(iter(trials.seeds(tuned)), tuned)
        events = [event for event in trials.found[shown] if event["cross-entropy"] < 4.5]  # the start is the same for all
        axes.plot(
            [event["seconds"] for event in events], [event["cross-entropy"] for event in events], label=system,
            color=_COLORS.get(system, _OTHER), linestyle="--" if system == IDEAL else "-",
        )  # fmt: skip
        if system == ALONE:
            axes.set_xlim(0, 1.05 * events[-1]["seconds"])  # slower systems need not be seen to their end
    axes.set_xlabel("simulated seconds")
    axes.set_ylabel("validation cross-entropy per word (nats)")
    axes.set_title(f"{place}: one run of each system, below a cross-entropy of 4.5")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    save_figure(figure, output)
