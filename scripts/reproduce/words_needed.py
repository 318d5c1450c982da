"""The table from which `nmt-simulate --compare` knows how many words a mode needs to learn as much as one machine."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

from prepare import ROOT

from reproduce.campaign import side_by_side
from reproduce.places import FAST, PLACES
from reproduce.runs import write_csv
from reproduce.systems import ALONE, IDEAL, SYSTEMS, plan_of
from reproduce.trials import Trial, Trials

TABLE = ROOT / "nmt_train" / "simulation" / "adviser" / "words_needed.csv"
_SHORTEST = 1_000_000  # words of the runs that count
# With local.outer none, four times a mean is the sum that mode sparse-local takes by itself. With other values of low-bit's
# keys, it is slower, and needs more words.
_DEFAULTS = {
    "local.outer": "none", "tiles.rate": "4", "tiles.decay": "1", "low_rank.dense_updates": "0", "low_bit.up": "2",
    "optimizer.name": "adam", "replicas.late_lookups": "false",
}  # fmt: skip
_LATE = {"replicas.late_lookups": "true"}  # the default of low-bit


def write(trials: Trials, folder: Path, jobs: int, path: Path = TABLE) -> None:
    """Write, for each mode and plan, the words of its best long run, relative to those of one machine with the same result.

    Runs with other batches are left out: users give batches of their own.
    Simulates the timing of modes in which the network decides how often workers exchange, in `folder`.
    """
    found: dict[tuple[str, str, int], list[Trial]] = {}
    for trial in trials.found:
        place = PLACES[trial.place]
        left_out = trial.system == ALONE or "batch.tokens" in plan_of(trial.settings) or not _has_defaults(trial)
        if not left_out and trial.words >= _SHORTEST and place.alone == FAST and not place.tuned_at:
            found.setdefault((*_choice(trial), place.workers), []).append(trial)
    chosen = {key: _best(its, trials) for key, its in sorted(found.items())}
    side_by_side([trial.timing(folder) for trial in chosen.values() if not SYSTEMS[trial.system].lockstep], jobs)
    rows = [["mode", "settings", "workers", "words", "low", "high", "period", "origin"]]
    for key, best in chosen.items():
        runs = trials.seeds(best) or [best]
        needed = [trials.words_trained(run) / trials.alone_until(trials.end(run), run.place) for run in runs]
        values = [mean(needed), min(needed), max(needed), _period(best, folder)]
        origin = f"{best.words / 1e6:g}M words, {len(runs)} seed{'s' * (len(runs) > 1)}"
        origin += f", {IDEAL}" * (best.system == IDEAL)
        rows.append([*map(str, key), *(f"{value:.3f}" for value in values), origin])
    write_csv(path, rows)


def _choice(trial: Trial) -> tuple[str, str]:
    """The mode and its settings, without what is tuned everywhere (rate, warm-up, beta1, floor)."""
    system = SYSTEMS[trial.system]
    fixed = ("replicas.codec=bf16",) if trial.system == IDEAL else system.fixed
    plan = (f"{key}={value}" for key, value in plan_of(trial.settings).items())
    settings = [setting for setting in (*fixed, *plan) if setting.split("=")[0] not in _DEFAULTS]
    return system.mode, " ".join(setting for setting in settings if setting != "batch.accumulate=1")


def _has_defaults(trial: Trial) -> bool:
    """Whether the settings that the table leaves out are those that a user's run has by itself."""
    values = dict(setting.split("=", 1) for setting in SYSTEMS[trial.system].fixed) | plan_of(trial.settings)
    defaults = _DEFAULTS | (_LATE if SYSTEMS[trial.system].mode == "low-bit" else {})
    return all(values.get(key, default) == default for key, default in defaults.items())


def _best(its: list[Trial], trials: Trials) -> Trial:
    """The longest run with seed 0 that learned most, of those with the most other seeds.

    If workers do not wait for each other, runs with the same settings on several networks are different runs.
    """
    tuned = [trial for trial in its if not trial.seed]
    longest = [trial for trial in tuned if trial.words == max(trial.words for trial in tuned)]
    most = max(len(trials.seeds(trial)) for trial in longest)
    return min((trial for trial in longest if len(trials.seeds(trial)) == most), key=trials.end)


def _period(trial: Trial, folder: Path) -> float:
    """Steps between two exchanges, if workers exchange when the network allows it; otherwise 0."""
    if SYSTEMS[trial.system].lockstep:
        return 0.0
    ranks = json.loads(trial.timing(folder).finished.read_text(encoding="utf-8"))["ranks"]
    return mean(rank["period"] for rank in ranks)
