"""The tables of docs/comparison.md that follow from trials.csv, equal-time.csv and bleu.csv; each is between two comments.

`<!-- tune:networks -->` begins the first one, and `<!-- end -->` ends each.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

from reproduce.comparison_page import marked, page_of
from reproduce.comparison_pictures import RIVALS, STEPS
from reproduce.places import FAST, FASTEST, JITTER, MACHINES, NETWORKS, PLACES, STRAGGLER, THESIS_4X2, THESIS_7X1
from reproduce.systems import ALONE, IDEAL, SYSTEMS, plan_of
from reproduce.trials import Trial, Trials

_BLOCK = re.compile(r"(<!-- tune:(\w+) -->\n).*?(?=<!-- end -->)", re.DOTALL)
_EQUAL_TIME = 302  # seconds: those of `low-bit` for 2M words at 1 Gbit/s


def filled(text: str, trials: Trials) -> str:
    """The page with the tables as the CSV files beside trials.csv have them now. Raises KeyError for an unknown table."""
    return _BLOCK.sub(lambda block: f"{block[1]}{_TABLES[block[2]](trials)}", text)


def write(trials: Trials, page: Path) -> None:
    """Put the tables into `page`."""
    page.write_text(filled(page.read_text(encoding="utf-8"), trials), encoding="utf-8")


def _networks(trials: Trials) -> str:
    """The speedup of each system on each network, and how far the best of ours is ahead of the best rival."""
    places = [FASTEST, *NETWORKS]
    found = {place: {system: trials.tuned(system, place) for system in SYSTEMS if system != ALONE} for place in places}
    best = {place: [_best(trials, its, rival) for rival in (False, True)] for place, its in found.items()}
    first = {place: pair[0] for place, pair in best.items()}
    rows = [["system", *(f"[{place}](comparison/{page_of(place, Path()).name}) ({STEPS[place]:g} steps)" for place in places)]]
    for system in sorted(SYSTEMS, key=lambda name: -_fastest(trials, found[FAST].get(name))):
        cells = [_speedup(trials, found[place].get(system), first[place]) for place in places]
        if any(cells):
            rows.append([f"{'rival: ' * (system in RIVALS)}{_code(system)}", *cells])
    for name, measure in (("best of ours / best rival, with Adam", trials.speedup), ("the same by *at most*", trials.at_most)):
        ratios = [f"{_mean(trials, ours, measure) / _mean(trials, rival, measure):.2f}" for ours, rival in best.values()]
        rows.append([name, *ratios])
    return _table(rows)


def _fastest(trials: Trials, tuned: Trial | None) -> float:
    return mean(trials.speedups(tuned)) if tuned else 0.0


def _best(trials: Trials, found: dict[str, Trial | None], rival: bool) -> Trial:
    """The best of ours or of the rivals, with Adam: no rival was trained with Muon."""
    adam = {system for system, its in SYSTEMS.items() if "optimizer.name=muon" not in its.fixed and system != IDEAL}
    its = [trial for system, trial in found.items() if trial and system in adam and (system in RIVALS) == rival]
    return max(its, key=lambda trial: _fastest(trials, trial))


def _mean(trials: Trials, tuned: Trial, measure: Callable[[Trial], float]) -> float:
    return mean(map(measure, trials.seeds(tuned) or [tuned]))


def _speedup(trials: Trials, tuned: Trial | None, first: Trial | None = None) -> str:
    if tuned is None:
        return ""
    text = marked(trials.speedups(tuned))
    return f"**{text}**" if tuned == first else text


def _conditions(trials: Trials) -> str:
    """Speedups with seed 0: with a slow machine, with times that vary, and without either; as after tuning for neither."""
    rows = [["system", "one machine at a quarter of the speed", "times vary by 20%", "neither"]]
    tuned = {system: [trials.tuned(system, place) for place in (STRAGGLER, JITTER, FAST)] for system in SYSTEMS}
    for system, (slow, jitter, neither) in tuned.items():
        if system != ALONE and slow and neither:
            cells = ("" if trial is None else f"{trials.speedup(trial):.2f}" for trial in (slow, jitter, neither))
            rows.append([_code(system), *cells])
    return _table([rows[0], *sorted(rows[1:], key=lambda row: -float(row[1]))])


def _machines(trials: Trials) -> str:
    """By number of machines: the words/s, data efficiency and speedup of each system that was trained to the end there."""
    rows = [["machines", "system", "batch", "words/s", "efficiency", "speedup", "per machine"]]
    for machines, place in MACHINES.items():
        alone = trials.tuned(ALONE, place)
        for system in SYSTEMS:
            tuned = trials.tuned(system, place) if system != ALONE else None
            if alone and tuned and tuned.words == alone.words:
                batch = plan_of(tuned.settings).get("batch.tokens", f"{PLACES[place].tokens}")
                share = f"{trials.speedup(tuned) / machines:.2f}"
                rows.append([f"{machines}", _code(system), batch, *_measures(trials, tuned, alone), share])
    return _table(rows)


def _thesis(trials: Trials) -> str:
    """Words/s, data efficiency and speedup on the thesis's clusters."""
    measures = ("words/s", "efficiency", "speedup")
    rows = [
        ["system", *(f"{place.removeprefix('thesis ')}: {name}" for place in (THESIS_4X2, THESIS_7X1) for name in measures)]
    ]
    for system in SYSTEMS:
        cells = list[str]()
        for place in (THESIS_4X2, THESIS_7X1):
            alone, tuned = trials.tuned(ALONE, place), trials.tuned(system, place)
            cells += _measures(trials, tuned, alone) if alone and tuned and system != ALONE else [""] * len(measures)
        if any(cells):
            rows.append([_code(system), *cells])
    return _table(rows)


def _measures(trials: Trials, tuned: Trial, alone: Trial) -> list[str]:
    values = (trials.pace(tuned) / trials.pace(alone), trials.data_efficiency(tuned), trials.speedup(tuned))
    return [f"{value:.2f}" for value in values]


def _equal_time(trials: Trials) -> str:
    """BLEU and cross-entropy on the test set after as many seconds as `low-bit` needs for 2M words, and who wins."""
    timed = trials.found | Trials(trials.path.with_name("equal-time.csv")).found
    found: dict[Trial, list[tuple[float, float]]] = {}
    with open(trials.path.with_name("bleu.csv"), encoding="utf-8", newline="") as lines:
        for system, place, words, seed, settings, *measured in list(csv.reader(lines))[1:]:
            its, tuned = Trial(system, place, int(words), int(seed), tuple(settings.split())), trials.tuned(system, FAST)
            same = tuned is not None and (place, its.settings) == (FAST, tuned.settings)
            if same and abs(float(timed[its][-1]["seconds"]) / _EQUAL_TIME - 1) < 0.02:
                bleu, cross_entropy = map(float, measured)
                found.setdefault(replace(its, seed=0), []).append((bleu, -cross_entropy))
    ours = next(values for trial, values in found.items() if trial.system == "low-bit")
    rows = [["system", "words", "BLEU", "cross-entropy on the test set", "`low-bit`"]]
    for trial, values in sorted(found.items(), key=lambda item: -mean(bleu for bleu, _ in item[1])):
        bleus, losses = zip(*values, strict=True)
        said = "" if values is ours else judged(ours, values)
        rows.append([_code(trial.system), f"{trial.words / 1e6:.2f}M", marked(bleus, decimals=1),
                     marked([-loss for loss in losses], decimals=3), said])  # fmt: skip
    return _table(rows)


def judged(ours: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> str:
    """*wins*: each of our models is better than each of the others, by both measures; *ahead*: both means are."""
    pairs = list(zip(zip(*ours, strict=True), zip(*others, strict=True), strict=True))
    if all(min(mine) > max(theirs) for mine, theirs in pairs):
        return "wins"
    return "is ahead" if all(mean(mine) > mean(theirs) for mine, theirs in pairs) else ""


def _code(system: str) -> str:
    """The name of a system, in which the mode is code."""
    return system if system.startswith((ALONE, IDEAL)) else re.sub(r"^[\w-]+", lambda name: f"`{name[0]}`", system)


def _table(rows: Iterable[Sequence[str]]) -> str:
    head, *rest = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *rest]) + "\n"


_TABLES = {
    "networks": _networks, "conditions": _conditions, "machines": _machines, "thesis": _thesis, "equal_time": _equal_time,
}  # fmt: skip
