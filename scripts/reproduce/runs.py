"""Reads the results of simulated runs: speeds, curves, bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from nmt_train.common.errors import UserError
from nmt_train.distributed.transport import OF_MODEL
from nmt_train.run.log import events, validations


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


def points(folder: Path, output: Path) -> None:
    """Write every validation of every finished run in `folder` to a CSV file."""
    lines = ["run,seconds,words,cross-entropy"]
    for run in sorted(path.parent for path in folder.glob("*/finished")):
        for event in validations(run):
            lines.append(f"{run.name},{event['seconds']:.0f},{event['words']},{event['cross-entropy']:.4f}")
    output.write_text("\n".join(lines) + "\n", encoding="utf-8")


class NotReached(Exception):
    """A run ended before it reached the target cross-entropy."""


class Missing(UserError):
    """A run's log lacks the events that would answer a question."""


_LINE = 5  # validations through which a line is fitted: one validation alone is too noisy


def line(found: Sequence[dict[str, Any]], of: str) -> tuple[float, float]:
    """Intercept and slope of the least-squares line of cross-entropy over `of` (words or seconds)."""
    places, values = [float(event[of]) for event in found], [float(event["cross-entropy"]) for event in found]
    middle, mean = sum(places) / len(places), sum(values) / len(values)
    slope = sum((place - middle) * (value - mean) for place, value in zip(places, values, strict=True))
    slope /= sum((place - middle) ** 2 for place in places)
    return mean - slope * middle, slope


def fitted(found: Sequence[dict[str, Any]], words: float) -> float:
    """Cross-entropy after `words` words, on the line through the last five validations up to there."""
    before = [event for event in found if event["words"] <= words * (1 + 1e-6)][-_LINE:]
    intercept, slope = line(before, "words")
    return intercept + slope * words


def crossing(found: Sequence[dict[str, Any]], target: float) -> float:
    """Seconds until the line through five validations in a row has first fallen to `target`; infinite if none has."""
    for end in range(_LINE, len(found) + 1):
        last = found[end - _LINE : end]
        intercept, slope = line(last, "seconds")
        if intercept + slope * last[-1]["seconds"] <= target:
            crossed = (target - intercept) / slope if slope < 0 else last[0]["seconds"]
            return float(max(crossed, last[0]["seconds"]))
    return float("inf")


_GAP = 1.5  # times the usual distance between two events; a missing event makes the distance 2


class Runs:
    """The results of the runs in `folder`: speeds from `timing/<name>`, curves from `training/<name>`.

    Methods raise UserError if a run is missing or has no file `finished`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def timing(self, setup: Setup) -> dict[str, Any]:
        path = self.folder / "timing" / setup.name / "timing.json"
        if not path.exists():
            raise UserError(f"{path}: does not exist; run the reproduction script again to complete it")
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return values

    def sent_per_word(self, setup: Setup) -> float:
        """Bytes that the first rank of a timing sent per word it processed."""
        rank = self.timing(setup)["ranks"][0]
        return float(rank["sent"]) / (rank["words_per_second"] * rank["seconds"])

    def run(self, setup: Setup) -> Path:
        """The folder of a training run."""
        run = self.folder / "training" / setup.name
        if not (run / "finished").exists():
            raise UserError(f"{run}: is not finished; run the reproduction script again to complete it")
        return run

    def validations(self, setup: Setup) -> list[dict[str, Any]]:
        return validations(self.run(setup))

    def time_to(self, setup: Setup, target: float) -> float:
        """Virtual seconds to a cross-entropy, interpolated between two validations; infinite if it was not reached.

        Raises Missing if it was reached where a validation is missing, or before the first validation.
        """
        before: dict[str, Any] | None = None
        found = self.validations(setup)
        for event in found:
            if event["cross-entropy"] <= target:
                before = _not_far(setup, found, before, event)
                share = (before["cross-entropy"] - target) / (before["cross-entropy"] - event["cross-entropy"])
                return float(before["seconds"] + share * (event["seconds"] - before["seconds"]))
            before = event
        return float("inf")

    def after(self, setup: Setup, amount: float, of: str = "words") -> float:
        """Cross-entropy after `amount` words (or seconds), interpolated between two validations; the last one if there were
        fewer. Raises Missing if a validation is missing there.
        """
        before: dict[str, Any] | None = None
        found = self.validations(setup)
        for event in found:
            if event[of] == amount:
                return float(event["cross-entropy"])
            if event[of] > amount:
                before = _not_far(setup, found, before, event)
                share = (amount - before[of]) / (event[of] - before[of])
                return float(before["cross-entropy"] + share * (event["cross-entropy"] - before["cross-entropy"]))
            before = event
        return float(before["cross-entropy"]) if before else float("nan")

    def sent(self, setup: Setup) -> tuple[int, int, int]:
        """The number of gradient and parameter messages of all ranks of a training run, their bytes (unscaled), and the words
        trained; zeros if they were never reported. Raises Missing if the first reports are missing.
        """
        reported = self._reports(setup)
        kinds = [tag.name.lower() for tag in OF_MODEL]
        counts = [rank["sent"][kind] for event in reported for rank in event["ranks"] for kind in kinds if kind in rank["sent"]]
        return sum(count[0] for count in counts), sum(count[1] for count in counts), reported[-1]["words"] if reported else 0

    def staleness(self, setup: Setup) -> float:
        """Mean staleness: updates by other workers between the pull and the push of a gradient."""
        counts = [
            (int(key), count)
            for event in self._reports(setup)
            for rank in event["ranks"]
            for key, count in rank["staleness"].items()
        ]
        return sum(key * count for key, count in counts) / max(1, sum(count for _, count in counts))

    def _reports(self, setup: Setup) -> list[dict[str, Any]]:
        """The events with measurements of all ranks, from the start of the run."""
        reported = events(self.run(setup), "ranks")
        if reported and reported[0]["words"] > _GAP * _usual(reported):
            raise Missing(f"the first reports of {setup.name} are missing")
        return reported


def _not_far(
    setup: Setup, found: Sequence[dict[str, Any]], before: dict[str, Any] | None, event: dict[str, Any]
) -> dict[str, Any]:
    """Return `before` if no validation is missing between it and `event`; otherwise raise Missing."""
    if before is None or event["words"] - before["words"] > _GAP * _usual(found):
        raise Missing(f"validations of {setup.name} before {event['words']:,} words are missing")
    return before


def _usual(found: Sequence[dict[str, Any]]) -> float:
    """The median distance in words between two events, including the distance from the start to the first."""
    return median(after - before for before, after in pairwise([0, *(event["words"] for event in found)]))
