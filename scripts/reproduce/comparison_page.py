"""The page of one place of the comparison: tables and a figure of what the trials found."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import mean

from nmt_train.common.errors import UserError
from reproduce.claims import spread
from reproduce.comparison_pictures import TITLES, curves, page_name
from reproduce.places import PLACES
from reproduce.runs import crossing
from reproduce.systems import ALONE, SYSTEMS
from reproduce.trials import Trials

_ABOUT = """# Results of the comparison: {title}

Made by `scripts/tune` from trials.csv; [comparison.md](../comparison.md) has the protocol and the meaning of the columns and
settings. For each system, the table has its best settings: runs with seeds 1 to 3, or, if there are none, the run with seed 0,
with which settings are chosen. *Tuning* says how many settings were tried here, in runs of how many words; "no" means that
only a few settings of another network or system were tried, so that the row is probably an underestimate. *At most* is the
speedup if one machine's time is the first moment at which any of its runs is as good, without interpolation.

"""


def write(trials: Trials, place: str, folder: Path) -> Path:
    """Write the page and its figure into `folder`; returns the page. UserError without trials of one machine."""
    name = page_name(place)
    text = _ABOUT.format(title=TITLES.get(place, place)) + table(trials, place)
    late = times(trials, place)
    if late:
        text += f"\n## Time to the late target\n\n{late}"
    several = (trials.tuned(system, place) for system in SYSTEMS if system != ALONE)
    if any(trials.longer(tuned) for tuned in several if tuned):
        text += f"\n## Longer runs\n\n{table(trials, place, longer=True)}"
    curves(trials, place, folder / f"{name}.svg")
    text += f"\n![cross-entropy against time]({name}.svg)\n"
    page = folder / f"{name}.md"
    page.write_text(text, encoding="utf-8")
    return page


def table(trials: Trials, place: str, longer: bool = False) -> str:
    """A Markdown table of the best settings of each system at its greatest length, as the mean and range over its seeds.

    Seed 0, with which the settings were chosen, counts only if there is no other. longer: of the systems that were trained
    much longer with these settings.
    """
    lines = [
        "| system | words | seeds | cross-entropy | data efficiency | relative words/s | speedup | at most | tuning |"
        " settings |",
        "|---" * 10 + "|",
    ]
    alone = trials.tuned(ALONE, place)
    if alone is None or len(trials.alone(place)) < 2:
        raise UserError(
            f"{trials.path}: has no trials of {ALONE} at two lengths; run scripts/tune '{ALONE}' --place"
            f" '{PLACES[place].alone}' first"
        )
    for system in SYSTEMS:
        tuned = trials.tuned(system, place)
        if tuned is None:
            continue
        same = trials.longer(tuned) if longer else trials.seeds(tuned) or [tuned]
        if not same:
            continue
        ends = [trials.end(trial) for trial in same]
        columns = (
            system, f"{same[0].words / 1e6:g}M", ", ".join(str(trial.seed) for trial in same), spread(ends, decimals=3),
            spread([trials.alone_until(trials.end(trial), place) / trials.words_trained(trial) for trial in same]),
            spread([trials.pace(trial) / trials.pace(alone) for trial in same]),
            spread([trials.speedup(trial) for trial in same]), spread([trials.at_most(trial) for trial in same]),
            trials.tuning(tuned), " ".join(tuned.settings),
        )  # fmt: skip
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"


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
            reached = [time for time in found if math.isfinite(time)]
            said = [spread(reached, decimals=0)] if reached else []
            if len(reached) < len(found):
                said.append(f"{len(found) - len(reached)} of {len(found)} runs did not reach it")
            columns = (
                system, ", ".join(str(trial.seed) for trial in runs), f"{runs[0].words / 1e6:g}M",
                ", ".join(said),
                spread([base / time for time in reached]) if len(reached) == len(found) else "-",
            )  # fmt: skip
            lines.append(f"| {' | '.join(columns)} |")
    head = [
        f"Target: cross-entropy {target:.3f}. One machine's mean time to it: {base:.0f} s.", "",
        "| system | seeds | words of the run | virtual seconds to the target | one machine's time / this time |",
        "|---|---|---|---|---|",
    ]  # fmt: skip
    return "\n".join([*head, *lines]) + "\n" if lines else ""
