"""Results of runs on the thesis's clusters (Neckermann 2017, chapter 4), relative to one machine with one device."""

from __future__ import annotations

import math
from pathlib import Path

from reproduce.runs import NotReached, Runs, Setup

BOUND = ("overlap.bound=2",)
MOST = ("dropping.up=0.999", "dropping.down=0.999")
REMOTE = ("exchange.bypass=false", *MOST)
THOUSANDTH = ("dropping.up=0.999",)
# The speedups over 1x1 that the thesis reports.
GOALS = {Setup("sparse-overlap", "4x2"): 4.3, Setup("sparse-overlap", "7x1"): 5.0, Setup("sparse", "4x1"): 2.5}


class Results(Runs):
    """`target`: the cross-entropy that all setups should reach."""

    def __init__(self, folder: Path, target: float) -> None:
        super().__init__(folder)
        self.target = target

    def speed(self, mode: str, cluster: str, *options: str) -> float:
        """Words per second of all ranks."""
        return float(self.timing(Setup(mode, cluster, options))["words_per_second"])

    def per_node(self, mode: str, cluster: str) -> float:
        return self.speed(mode, cluster) / int(cluster.split("x")[0])

    def seconds(self, mode: str, cluster: str, *options: str) -> float:
        """Virtual seconds to the target; infinite if it was not reached."""
        return self.time_to(Setup(mode, cluster, options), self.target)

    def faster(self, mode: str, cluster: str, *options: str, than: tuple[str, str] = ("single", "1x1")) -> float:
        """How many times sooner the target is reached than by another setup."""
        return self.seconds(*than) / self.seconds(mode, cluster, *options)

    def gain(self, slow: Setup, quick: Setup) -> float:
        """How many times sooner the target is reached by one of two setups; NotReached if one does not reach it."""
        times = [self.time_to(setup, self.target) for setup in (slow, quick)]
        for setup, seconds in zip((slow, quick), times, strict=True):
            if math.isinf(seconds):
                raise NotReached(f"{setup.name} does not reach {self.target:.3f}")
        return times[0] / times[1]
