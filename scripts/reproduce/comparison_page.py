"""The page of one place of the comparison: tables and a figure of what the trials found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from nmt_train.common.errors import UserError
from reproduce.comparison_pictures import TITLES, curves, page_name
from reproduce.places import FAST, PLACES
from reproduce.runs import crossing
from reproduce.systems import ALONE, SYSTEMS
from reproduce.trials import Trial, Trials

_ABOUT = """# Comparison: {title}

From trials.csv, by `scripts/tune`. Runs of {words:g}M words; [columns, settings and marks](protocol.md#columns-and-settings).

"""


def write(trials: Trials, place: str, folder: Path) -> Path:
    """Write the page and its figure into `folder`; returns the page. UserError without trials of one machine."""
    page = page_of(place, folder)
    text = _ABOUT.format(title=TITLES.get(place, place), words=_alone(trials, place).words / 1e6) + table(trials, place)
    late = times(trials, place)
    if late:
        text += f"\n## Time to the late target\n\n{late}"
    several = (trials.tuned(system, place) for system in SYSTEMS if system != ALONE)
    if any(trials.longer(tuned) for tuned in several if tuned):
        text += f"\n## Longer runs\n\n{table(trials, place, longer=True)}"
    curves(trials, place, page.with_suffix(".svg"))
    text += f"\n![cross-entropy against time]({page.stem}.svg)\n"
    page.write_text(text, encoding="utf-8")
    return page


def page_of(place: str, folder: Path) -> Path:
    """The page of one place."""
    return folder / f"{page_name(place)}.md"


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
