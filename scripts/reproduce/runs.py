"""What simulated runs found: validations, speeds and bytes. Two CSV files keep it, so that pages need no run folders."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nmt_train.common import atomic_file
from nmt_train.common.errors import UserError
from nmt_train.run.log import events, validations
from nmt_train.transport import TRAINING

_DIGEST = "digest of the configuration and the clusters"  # a row of measures.csv
_SPEED = "timing words/s"  # in measures.csv
CURVES, MEASURES = "curves.csv", "measures.csv"
# Times the distance between two validations: the last one may be this much earlier, or later, than what is asked for.
_GAP, _OVERSHOT = 1.5, 0.25
_LINE = 5  # validations through which a line is fitted: one validation alone is too noisy


@dataclass(frozen=True)
class Setup:
    """One bar or curve: a mode on a cluster, such as `sparse 4x2`, and optional settings."""

    mode: str
    cluster: str
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        parts = [self.mode, self.cluster, *(option.split(".", 1)[-1] for option in self.options)]
        return re.sub(r"[^\w.=-]", "", "-".join(parts))

    def with_seed(self, seed: int) -> Setup:
        """The same run with another random seed; seed 1 is the default of every configuration."""
        return self if seed == 1 else replace(self, options=(*self.options, f"seed={seed}"))


class Missing(UserError):
    """A run was not made, or its log lacks what would answer a question."""


def line(found: Sequence[dict[str, Any]], of: str) -> tuple[float, float]:
    """Intercept and slope of the least-squares line of cross-entropy over `of` (words or seconds)."""
    places, values = [float(event[of]) for event in found], [float(event["cross-entropy"]) for event in found]
    middle, mean = sum(places) / len(places), sum(values) / len(values)
    slope = sum((place - middle) * (value - mean) for place, value in zip(places, values, strict=True))
    slope /= sum((place - middle) ** 2 for place in places)
    return mean - slope * middle, slope


def fitted(found: Sequence[dict[str, Any]], place: float, of: str = "words", fewest: int = 5) -> float:
    """Cross-entropy after `place` words (or seconds), on the line through the last five validations up to there.

    A run validates a little later than it should, at the end of an update. Raises Missing if there are fewer than `fewest`,
    at least 2, or if the last one was much earlier.
    """
    gap = min((later[of] - event[of] for event, later in itertools.pairwise(found)), default=0.0)
    before = [event for event in found if event[of] <= place + _OVERSHOT * gap][-_LINE:]
    if len(before) < fewest or place - before[-1][of] > _GAP * (before[-1][of] - before[-2][of]):
        raise Missing(f"fewer than {fewest} validations end at {place:,.0f} {of}")
    intercept, slope = line(before, of)
    return intercept + slope * place


def crossing(found: Sequence[dict[str, Any]], target: float) -> float:
    """Seconds until the line through five validations in a row has first fallen to `target`; infinite if none has."""
    for end in range(_LINE, len(found) + 1):
        last = found[end - _LINE : end]
        intercept, slope = line(last, "seconds")
        if intercept + slope * last[-1]["seconds"] <= target:
            crossed = (target - intercept) / slope if slope < 0 else last[0]["seconds"]
            return float(max(crossed, last[0]["seconds"]))
    return float("inf")


class Runs:
    """The files curves.csv (every validation of every run) and measures.csv (numbers of runs) in `folder`.

    Timings and training runs have the same names; a timing's measures begin with `timing `. Methods raise Missing if a run was
    not made.
    """

    def __init__(self, folder: Path, digest: str = "") -> None:
        """digest: of the configuration and the clusters. Raises UserError if the files have results of others."""
        self.folder, self._digest = folder, digest
        self._curves: dict[str, list[dict[str, Any]]] = {}
        self._measures: dict[tuple[str, str], float] = {}
        measures = _rows(folder / MEASURES)
        if digest and measures and not any(row["measure"] == _DIGEST and row["value"] == digest for row in measures):
            raise UserError(
                f"{folder / MEASURES}: its results are of another configuration or other clusters; undo the change of the"
                f" configuration, or move this file and {CURVES} away to start over"
            )
        for row in _rows(folder / CURVES):
            event = {"seconds": float(row["seconds"]), "words": int(row["words"]), "cross-entropy": float(row["cross-entropy"])}
            self._curves.setdefault(row["run"], []).append(event)
        for row in measures:
            if row["measure"] != _DIGEST:
                self._measures[row["run"], row["measure"]] = float(row["value"])

    def collect(self, runs: Path) -> None:
        """Add the finished runs of the folder `runs` (timing/<name>, training/<name>), and write both files."""
        for path in sorted(runs.glob("timing/*/timing.json")):
            for name, value in self.measures(path):
                self._measures[path.parent.name, f"timing {name}"] = value
        for run in sorted(path.parent for path in runs.glob("training/*/finished")):
            self._curves[run.name] = [
                {
                    "seconds": round(event["seconds"], 1),
                    "words": event["words"],
                    "cross-entropy": round(event["cross-entropy"], 4),
                }
                for event in validations(run)
            ]
            for name, value in _reported(run):
                self._measures[run.name, name] = value
        self.folder.mkdir(parents=True, exist_ok=True)
        curves = [[name, *event.values()] for name, found in sorted(self._curves.items()) for event in found]
        write_csv(self.folder / CURVES, [["run", "seconds", "words", "cross-entropy"], *curves])
        measures = [[*key, f"{value:.6g}"] for key, value in sorted(self._measures.items())]
        write_csv(self.folder / MEASURES, [["run", "measure", "value"], ["", _DIGEST, self._digest], *measures])

    def measures(self, timing: Path) -> Iterator[tuple[str, float]]:
        """Numbers of a simulation of the timing, from its file timing.json."""
        return _timed(json.loads(timing.read_text(encoding="utf-8")))

    def timed(self, setup: Setup) -> bool:
        """Whether its words/s are known: from a run folder, or from the files, which may be of another machine."""
        return (setup.name, _SPEED) in self._measures

    def trained(self, setup: Setup) -> bool:
        return setup.name in self._curves

    def measure(self, setup: Setup, name: str) -> float:
        """One of the numbers that `_timed` and `_reported` yield."""
        try:
            return self._measures[setup.name, name]
        except KeyError:
            raise Missing(f"not run yet: {setup.name} ({name})") from None

    def speed(self, setup: Setup) -> float:
        """Words per second of all ranks."""
        return self.measure(setup, _SPEED)

    def curve(self, setup: Setup) -> list[dict[str, Any]]:
        """Its validations: seconds, words and cross-entropy of each."""
        try:
            return self._curves[setup.name]
        except KeyError:
            raise Missing(f"not trained yet: {setup.name}") from None

    def time_to(self, setup: Setup, target: float) -> float:
        """Virtual seconds until the line through five validations has fallen to `target`; infinite if it never has."""
        return crossing(self.curve(setup), target)

    def after(self, setup: Setup, place: float, of: str = "words") -> float:
        """Cross-entropy after `place` words (or seconds), on a line through five validations."""
        return fitted(self.curve(setup), place, of)


def write_csv(path: Path, rows: Iterable[Sequence[object]]) -> None:
    """Replace the file; an interruption leaves the old one, whose results may exist nowhere else."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    atomic_file.write(path, text.getvalue().encode())


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with open(path, encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def _timed(values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """What a simulation of the timing found."""
    ranks = values["ranks"]
    yield "words/s", values["words_per_second"]
    yield "workers", len(ranks)
    yield "elements", values["elements"]
    yield "bytes/word of the first rank", ranks[0]["sent"] / (ranks[0]["words_per_second"] * ranks[0]["seconds"])
    shares = Counter[str]()
    for rank in ranks:
        for thread, spans in rank["spent"].items():
            for name, seconds in spans.items():
                shares[f"share of {thread}: {name}"] += seconds / rank["seconds"] / len(ranks)
    yield from shares.items()


def _reported(run: Path) -> Iterator[tuple[str, float]]:
    """What the ranks of a training run reported: training messages, their bytes (for the model as it is), and staleness."""
    reports = [rank for event in events(run, "ranks") for rank in event["ranks"]]
    counts = [rank["sent"][tag.name.lower()] for rank in reports for tag in TRAINING if tag.name.lower() in rank["sent"]]
    if counts:
        yield "messages", sum(count[0] for count in counts)
        yield "bytes/message", sum(count[1] for count in counts) / sum(count[0] for count in counts)
    stale = [(int(updates), count) for rank in reports for updates, count in rank["staleness"].items()]
    if stale:
        yield "staleness", sum(updates * count for updates, count in stale) / sum(count for _, count in stale)
