"""The thesis's experiments (Neckermann 2017, chapter 4) as runs on virtual clusters found them: speeds, times to a target."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmt_train.errors import UserError
from nmt_train.log import read_metrics


@dataclass(frozen=True)
class Setup:
    """One bar or curve: a mode on a cluster, as `sparse 4x2`, perhaps with options of its own."""

    mode: str
    cluster: str
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "-".join([self.mode, self.cluster, *(option.split(".", 1)[-1] for option in self.options)])


BOUND = ("overlap.bound=2",)
MOST = ("dropping.up=0.999", "dropping.down=0.999")
REMOTE = ("exchange.bypass=false", *MOST)
THOUSANDTH = ("dropping.up=0.999",)
# How many times as fast as 1x1 these should be, which the thesis found.
GOALS = {Setup("sparse-overlap", "4x2"): 4.3, Setup("sparse-overlap", "7x1"): 5.0, Setup("sparse", "4x1"): 2.5}


def validations(run: Path) -> list[dict[str, Any]]:
    """The events of a run folder that are validations."""
    file = run / "metrics.jsonl"
    return [event for event in (read_metrics(file) if file.exists() else []) if event["event"] == "validation"]


class NotReached(Exception):
    """A run ended before it was as good as those that it is compared with."""


class Results:
    """What the runs in `folder` found: speeds from `timing/<name>`, curves from `training/<name>`. `target` is a
    cross-entropy; UserError if a run is missing.
    """

    def __init__(self, folder: Path, target: float) -> None:
        self.folder, self.target = folder, target

    def timing(self, setup: Setup) -> dict[str, Any]:
        path = self.folder / "timing" / setup.name / "timing.json"
        if not path.exists():
            raise UserError(f"{path}: is not there; let the reproduction go on")
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return values

    def speed(self, mode: str, cluster: str, *options: str) -> float:
        """Words per second of all ranks."""
        return float(self.timing(Setup(mode, cluster, options))["words_per_second"])

    def per_node(self, mode: str, cluster: str) -> float:
        return self.speed(mode, cluster) / int(cluster.split("x")[0])

    def curve(self, mode: str, cluster: str, *options: str) -> list[dict[str, Any]]:
        """The validations of a training run; UserError unless it is over, which the file `finished` says."""
        run = self.folder / "training" / Setup(mode, cluster, options).name
        if not (run / "finished").exists():
            raise UserError(f"{run}: is not finished; let the reproduction go on")
        return validations(run)

    def seconds(self, mode: str, cluster: str, *options: str) -> float:
        """Virtual seconds to the target, between two validations by a straight line; infinite if it was not reached."""
        before: dict[str, Any] | None = None
        for event in self.curve(mode, cluster, *options):
            if event["cross-entropy"] <= self.target:
                if before is None:
                    return float(event["seconds"])
                share = (before["cross-entropy"] - self.target) / (before["cross-entropy"] - event["cross-entropy"])
                return float(before["seconds"] + share * (event["seconds"] - before["seconds"]))
            before = event
        return float("inf")

    def faster(self, mode: str, cluster: str, *options: str, than: tuple[str, str] = ("single", "1x1")) -> float:
        """How many times sooner the target is reached than by another setup."""
        return self.seconds(*than) / self.seconds(mode, cluster, *options)

    def gain(self, slow: Setup, quick: Setup) -> float:
        """How many times sooner the target is reached by one of two setups; NotReached if one does not reach it."""
        times = [self.seconds(setup.mode, setup.cluster, *setup.options) for setup in (slow, quick)]
        for setup, seconds in zip((slow, quick), times, strict=True):
            if math.isinf(seconds):
                raise NotReached(f"{setup.name} does not reach {self.target:.3f}")
        return times[0] / times[1]

    def at_words(self, words: float, mode: str, cluster: str, *options: str) -> float:
        """Cross-entropy after so many words, between two validations by a straight line; of the last if there were fewer."""
        before: dict[str, Any] | None = None
        for event in self.curve(mode, cluster, *options):
            if event["words"] >= words and before is not None:
                share = (words - before["words"]) / (event["words"] - before["words"])
                return float(before["cross-entropy"] + share * (event["cross-entropy"] - before["cross-entropy"]))
            before = event
        return float(before["cross-entropy"]) if before else float("nan")
