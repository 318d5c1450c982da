"""Training runs of the comparison: how each is started, and the file that keeps every validation of every one of them."""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from statistics import mean
from typing import Any

import yaml
from prepare import ROOT

from nmt_train.common.errors import UserError
from nmt_train.run.log import validations
from reproduce.campaign import Job, command
from reproduce.places import PLACES
from reproduce.runs import crossing, fitted
from reproduce.systems import ALONE, SYSTEMS, plan_of

BUDGET = 8_000_000  # words with which a system is tuned at one place, without refining
RUNGS = ((8, 4), (2, 2), (1, 1))  # of a search: how many trials, and their length as a share of the last rung's
_VALIDATIONS = 40  # in a run: the line through five of them covers its last tenth
_WARMED = 2_000_000  # the words of a run whose warm-up is as long as it says; that of others is scaled
_NEVER = 10**12  # words: a checkpoint waits for the exchange in flight, so there is only that of the end
_TIMED = 1000  # steps of every rank, of which the first are not counted, in a simulation of the timing alone
# The late target is what one machine has after this share of its run; runs to it have some words to spare, and round lengths.
# They have at most twice its words; with more, a run shows what longer training gives.
LATE, _SPARE, _ROUNDED, _MOST = 0.95, 1.05, 100_000, 2


@dataclass(frozen=True)
class Trial:
    """One run. place: one of PLACES. words: its length, over which the learning rate falls.

    settings: key=value; those of a `plan` are joined by commas. `rate` and `beta1` are keys of the optimizer; `warmup`
    (and `low_rank.dense_updates`, `pipeline.warmup`) is that of a run of 2M words with four workers and batches of 448 tokens,
    in updates; `floor` is the last learning rate as a share of the highest one.
    """

    system: str
    place: str
    words: int
    seed: int
    settings: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of its folder."""
        parts = (self.system, self.place.replace("/", ""), f"{self.words}", f"seed{self.seed}", *self.settings)
        return "-".join((*parts, _digest(self.place))).replace(" ", "")

    def job(self, folder: Path) -> Job:
        """The training run, in the folder training/<name>."""
        run = folder / "training" / self.name
        return Job(run, self._command(folder, run), run / "finished")

    def timing(self, folder: Path) -> Job:
        """Simulates only the timing: it writes timing/<name>/timing.json."""
        run = folder / "timing" / self.name
        return Job(run, (*self._command(folder, run), "--timing-only", str(_TIMED)), run / "timing.json")

    def _command(self, folder: Path, run: Path) -> tuple[str | Path, ...]:
        system, place = SYSTEMS[self.system], PLACES[self.place]
        where = (option for option in place.options if not (system.unlimited and option.startswith("cluster.network.")))
        options = (
            "optimizer.schedule=cosine", *system.fixed, *self._options(), *where,
            "cluster.snapshots=free", f"seed={self.seed}", f"stop.after={self.words}t", f"checkpoint.every={_NEVER}t",
            f"validation.every={self.words // _VALIDATIONS}t", "optimizer.not_finite=skip",
        )  # fmt: skip
        return command(place.config, place.cluster, system.mode, run, place.vocabulary(folder), options)

    def _options(self) -> Iterator[str]:
        values = dict(setting.split("=", 1) for setting in self.settings)
        values.pop("plan", None)
        for key, value in (values | plan_of(self.settings)).items():
            if key == "rate":
                yield f"optimizer.learning_rate={value}"
            elif key == "beta1":
                yield from (f"optimizer.beta1={value}", f"optimizer.async_beta1={value}")
            elif key == "warmup":
                yield from (f"{key}={self._updates(value)}" for key in ("optimizer.warmup", "optimizer.async_warmup"))
            elif key in ("low_rank.dense_updates", "pipeline.warmup"):
                yield f"{key}={self._updates(value)}"
            elif key == "floor":
                yield f"optimizer.minimum={float(value) * float(values['rate']):g}"
            else:
                yield f"{key}={value}"

    def _updates(self, value: str) -> int:
        """A number of updates of a run of 2M words on the league's cluster, scaled to this run."""
        place = PLACES[self.place]
        batch = re.search(r"batch\.tokens=(\d+)", " ".join(self.settings))
        share = place.tokens / int(batch[1]) if batch else 1.0
        return round(float(value) * share * self.words / _WARMED * place.updates(SYSTEMS[self.system].singly))


def _digest(place: str) -> str:
    """Of the task and its cluster: runs of another task are not continued."""
    files = (PLACES[place].config, PLACES[place].cluster)
    return hashlib.sha256(b"".join((ROOT / file).read_bytes() for file in files)).hexdigest()[:8]


_KEYS = [field.name for field in fields(Trial)]
_VALUES = ["at", "seconds", "cross-entropy", "precision"]


class Trials:
    """Every validation of every trial, in a CSV file: one line with the words, virtual seconds and cross-entropy of each.

    Each line also has the precision of matrix products (docs/archive/comparison-changes.md).
    """

    def __init__(self, path: Path) -> None:
        self.path, self.found = path, dict[Trial, list[dict[str, Any]]]()
        if path.exists():
            with open(path, encoding="utf-8", newline="") as lines:
                for row in csv.DictReader(lines):
                    trial = Trial(
                        row["system"], row["place"], int(row["words"]), int(row["seed"]), tuple(row["settings"].split())
                    )
                    event = {
                        "words": int(row["at"]), "seconds": float(row["seconds"]), "cross-entropy": float(row["cross-entropy"]),
                        "precision": row["precision"],
                    }  # fmt: skip
                    self.found.setdefault(trial, []).append(event)

    def add(self, trial: Trial, run: Path) -> None:
        """Append the validations of a finished run to the file."""
        precision = yaml.safe_load((run / "config.yml").read_text(encoding="utf-8"))["precision"]
        self._append(trial, [{**event, "precision": precision} for event in validations(run)])

    def twin(self, trial: Trial) -> Trial | None:
        """A trial that differs only in the network, if this changes only its times, and all by the same factor.

        Its initial parameters, batches and updates are the same, so each cross-entropy is the same to the last digit.
        """
        its = [
            other for other in self.found
            if SYSTEMS[trial.system].scales and replace(other, place=trial.place) == trial
            and PLACES[other.place].differs_in_network(PLACES[trial.place])
        ]  # fmt: skip
        return its[0] if its else None

    def retime(self, trial: Trial, twin: Trial, folder: Path) -> None:
        """Append the validations of the twin, with times scaled by the ratio of words/s in the two timings."""
        its, there = (json.loads(each.timing(folder).finished.read_text())["words_per_second"] for each in (trial, twin))
        self._append(trial, [{**event, "seconds": event["seconds"] * there / its} for event in self.found[twin]])

    def _append(self, trial: Trial, found: list[dict[str, Any]]) -> None:
        self.found[trial] = found
        new = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8", newline="") as lines:
            writer = csv.writer(lines, lineterminator="\n")
            if new:
                writer.writerow([*_KEYS, *_VALUES])
            *keys, settings = astuple(trial)
            for event in found:
                values = (event["words"], f"{event['seconds']:.1f}", f"{event['cross-entropy']:.4f}", event["precision"])
                writer.writerow([*keys, " ".join(settings), *values])

    def end(self, trial: Trial) -> float:
        """The cross-entropy at the end, on the line through the last five validations, or fewer if exchanges are rare."""
        found = self.found[trial]
        return fitted(found, found[-1]["words"], fewest=2) if len(found) > 1 else float(found[0]["cross-entropy"])

    def alone(self, place: str, of: str = "words") -> list[tuple[float, float]]:
        """For each length of one machine's runs: the words (or seconds) of the best one, and its cross-entropy at the end.

        Only runs that are the measure at this place count. The best settings of a length have the lowest cross-entropy, as the
        mean over their seeds; seed 0, with which settings are chosen, counts only if there is no other.
        """
        points = []
        for _, counted in sorted(self._alone(place).items()):
            value, trials = min(((mean(map(self.end, its)), its) for its in counted), key=lambda point: point[0])
            points.append((mean(float(self.found[trial][-1][of]) for trial in trials), value))
        return points

    def _alone(self, place: str) -> dict[int, list[list[Trial]]]:
        """By length: one machine's runs that count, those with the same settings together."""
        by_length: dict[int, dict[tuple[str, ...], list[Trial]]] = {}
        for trial in self.found:
            if trial.system == ALONE and trial.place == PLACES[place].alone:
                by_length.setdefault(trial.words, {}).setdefault(trial.settings, []).append(trial)
        return {
            words: [[trial for trial in its if trial.seed] or its for its in by_settings.values()]
            for words, by_settings in by_length.items()
        }

    def alone_until(self, cross_entropy: float, place: str, of: str = "words") -> float:
        """The words (or seconds) of a run of one machine that ends at this cross-entropy.

        Interpolated over the logarithm between the lengths that were tried, and extrapolated beyond them.
        """
        pairs = list(itertools.pairwise(self.alone(place, of)))
        (left, high), (right, low) = next((pair for pair in pairs if pair[1][1] <= cross_entropy), pairs[-1])
        share = (high - cross_entropy) / (high - low)
        return math.exp(math.log(left) + share * math.log(right / left))

    def data_efficiency(self, trial: Trial) -> float:
        """The words that one machine needs to the same cross-entropy, divided by those of this run."""
        return self.alone_until(self.end(trial), trial.place) / self.words_trained(trial)

    def speedup(self, trial: Trial) -> float:
        """How many times longer one machine takes to the same cross-entropy."""
        return self.alone_until(self.end(trial), trial.place, "seconds") / float(self.found[trial][-1]["seconds"])

    def at_most(self, trial: Trial) -> float:
        """The speedup, or less, if a run of one machine with any settings is as good sooner than the interpolation says.

        As the mean over the seeds of these settings. Such a run has a schedule of its full length, so its learning rate is
        still higher at this moment than at the end of a shorter run.
        """
        runs = itertools.chain(*self._alone(trial.place).values())
        first = min(mean(crossing(self.found[run], self.end(trial)) for run in its) for its in runs)
        return min(self.speedup(trial), first / float(self.found[trial][-1]["seconds"]))

    def speedups(self, tuned: Trial) -> list[float]:
        """Those of its runs with other seeds; of itself if there are none."""
        return [self.speedup(run) for run in self.seeds(tuned) or [tuned]]

    def score(self, trial: Trial) -> float:
        """What tuning maximizes: the speedup; for one machine, minus the cross-entropy."""
        return -self.end(trial) if trial.system == ALONE else self.speedup(trial)

    def tuned(self, system: str, place: str) -> Trial | None:
        """The best of the longest trials of a system with seed 0; None if there are none."""
        where = PLACES[place].alone if system == ALONE else place
        its = [trial for trial in self.found if (trial.system, trial.place, trial.seed) == (system, where, 0)]
        longest = [trial for trial in its if trial.words == max(trial.words for trial in its)]
        return self.best(longest, 1)[0] if longest else None

    def tuning(self, tuned: Trial) -> str:
        """The words in which settings of a system were tried at its place; no, if fewer settings than a search begins with."""
        its = [trial for trial in self.found if (trial.system, trial.place, trial.seed) == (tuned.system, tuned.place, 0)]
        searched = len({trial.settings for trial in its}) >= RUNGS[0][0]
        return f"{sum(trial.words for trial in its) / 1e6:.3g}M" if searched else "no"

    def seeds(self, tuned: Trial) -> list[Trial]:
        """The runs of the same length and settings with the other seeds."""
        its = (trial for trial in self.found if trial.seed and replace(trial, seed=0) == tuned)
        return sorted(its, key=lambda trial: trial.seed)

    def target(self, place: str) -> float:
        """The late target: the cross-entropy of one machine at 95% of its longest run, as the mean over its seeds but 0."""
        alone = self.tuned(ALONE, place)
        runs = self.seeds(alone) if alone else []
        if not runs:
            raise UserError(f"{self.path}: has no runs of {ALONE} with other seeds; run scripts/tune '{ALONE}' --seeds first")
        return mean(fitted(self.found[trial], LATE * trial.words) for trial in runs)

    def until_target(self, tuned: Trial, seed: int) -> Trial:
        """The run that is long enough to reach the target, if the system needs as many words as in the trial `tuned`."""
        alone = self.tuned(ALONE, tuned.place)
        length = alone.words if alone else tuned.words
        needed = _SPARE * length * self.words_trained(tuned) / self.alone_until(self.end(tuned), tuned.place)
        words = min(_MOST * length, math.ceil(needed / _ROUNDED) * _ROUNDED)
        return replace(tuned, seed=seed, words=max(words, tuned.words + _ROUNDED))

    def words_trained(self, trial: Trial) -> int:
        """The words of a run up to its last validation, which may be some more than was wanted."""
        return int(self.found[trial][-1]["words"])

    def to_target(self, tuned: Trial) -> list[Trial]:
        """The longest runs until the target, with the same settings and other seeds."""
        return self._longest(tuned, tuned.words + 1, _MOST * tuned.words)

    def longer(self, tuned: Trial) -> list[Trial]:
        """The longest runs that are too long for the target, with the same settings and other seeds."""
        return self._longest(tuned, _MOST * tuned.words + 1)

    def _longest(self, tuned: Trial, low: int, high: float = math.inf) -> list[Trial]:
        its = [
            trial for trial in self.found
            if trial.seed and low <= trial.words <= high and replace(trial, seed=0, words=tuned.words) == tuned
        ]  # fmt: skip
        longest = (trial for trial in its if trial.words == max(trial.words for trial in its))
        return sorted(longest, key=lambda trial: trial.seed)

    def pace(self, trial: Trial) -> float:
        """Words per virtual second."""
        return self.words_trained(trial) / float(self.found[trial][-1]["seconds"])

    def lasting(self, tuned: Trial, seconds: float) -> Trial:
        """A run with these settings, over the words, in whole thousands, that `tuned` reads in these virtual seconds."""
        return replace(tuned, words=1000 * round(self.pace(tuned) * seconds / 1000))

    def best(self, trials: Iterable[Trial], most: int) -> list[Trial]:
        return sorted(trials, key=self.score, reverse=True)[:most]
