"""Runs that are judged by three seeds where one seed could decide by chance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from reproduce.claims import Claim, Clause, judged, within
from reproduce.runs import Missing, Runs, Setup

T = TypeVar("T")
SEEDS = (1, 2, 3)


class SeededRuns(Runs):
    """unsure: setups that need more seeds, because a value is near a limit of a claim."""

    def __init__(self, folder: Path, digest: str = "") -> None:
        super().__init__(folder, digest)
        self.unsure: dict[Setup, None] = {}

    def by_seed(self, value: Callable[[int], T]) -> list[T]:
        """The value of each seed with which the runs were made. Raises Missing if there is none."""
        found = []
        for seed in SEEDS:
            try:
                found.append(value(seed))
            except Missing:
                if seed == SEEDS[0]:
                    raise
        return found

    def decide(
        self, says: str, setups: Iterable[Setup], values: Sequence[float], near: float, low: float = -math.inf,
        high: float = math.inf,
    ) -> Clause:  # fmt: skip
        """Whether a ratio lies in a range. near: if it is nearer to a limit, three seeds decide; infinite: always."""
        limits, ends = (low, high), [value for value in values if 0 < value < math.inf]
        close = math.isinf(near) or any(abs(end / limit - 1) < near for end in ends for limit in limits if math.isfinite(limit))
        if close and len(values) < len(SEEDS):
            self.unsure |= dict.fromkeys(setups)
            return Clause(f"{says} ({len(values)} of {len(SEEDS)} seeds)", None)
        return Clause(says, within(values, low, high))

    def more(self, claims: Sequence[Claim[Any]]) -> list[Setup]:
        """The runs with further seeds that these claims need."""
        for claim in claims:
            judged(claim, self)
        return [setup.with_seed(seed) for setup in self.unsure for seed in SEEDS[1:]]
