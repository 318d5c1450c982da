"""How many words a mode needs to learn as much as one machine: measured with four machines, extended to other numbers."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

_TABLE = "words_needed.csv"
_RARER = 1.25  # the longest period between exchanges, as a multiple of that where words were measured
_FEWEST = 0.05  # uncertainty of an entry from a single seed, as a share of the words


@dataclass(frozen=True)
class Needed:
    """Words, as a multiple of those of one machine that ends at the same cross-entropy: the best estimate, and its range."""

    words: float
    low: float
    high: float


ONE = Needed(1.0, 1.0, 1.0)  # of one worker


@dataclass(frozen=True)
class Choice:
    """A mode with settings, and what it needed with `workers` workers (docs/comparison.md). needed: None if not measured.

    period: steps between two exchanges in this measurement, if workers exchange when the network allows it; otherwise 0.
    """

    mode: str
    settings: Mapping[str, str]
    workers: int = 0
    needed: Needed | None = None
    period: float = 0.0
    origin: str = ""

    @property
    def name(self) -> str:
        return " ".join([self.mode, *(f"{key}={value}" for key, value in self.settings.items())])

    @property
    def options(self) -> str:
        """For the command line."""
        return " ".join([f"--mode {self.mode}", *(f"--{key} {value}" for key, value in self.settings.items())])

    def exchanged_as_often(self, period: float) -> bool:
        """Whether workers that exchange every `period` steps learn as was measured."""
        return not self.period or period <= _RARER * self.period

    def on(self, workers: int) -> Needed | None:
        """What it needs with another number of workers.

        What they need more than one worker is assumed to grow with the number of further workers; the range covers growth
        between the square root of this number and this number times 1.5. What they need less, because they were tuned
        better, is assumed not to grow.
        """
        if self.needed is None or workers == 1:
            return None if self.needed is None else ONE
        share = (workers - 1) / (self.workers - 1)
        if share == 1:
            return self.needed
        shares = share**0.5, 1.5 * share if share > 1 else share

        def scaled(value: float, share: float) -> float:
            return 1 + (value - 1) * (share if value > 1 else min(share, 1.0))

        low = min(scaled(self.needed.low, its) for its in shares)
        high = max(scaled(self.needed.high, its) for its in shares)
        return Needed(scaled(self.needed.words, share), low, high)


def measured() -> list[Choice]:
    """The choices in the table that `scripts/tune` writes, from tuned runs on simulated machines."""
    text = resources.files(__package__).joinpath(_TABLE).read_text(encoding="utf-8")
    found = []
    for row in csv.DictReader(text.splitlines()):
        settings = dict(part.split("=", 1) for part in row["settings"].split())
        words, low, high = (float(row[key]) for key in ("words", "low", "high"))
        if low == high:
            low, high = words * (1 - _FEWEST), words * (1 + _FEWEST)
        found.append(
            Choice(row["mode"], settings, int(row["workers"]), Needed(words, low, high), float(row["period"]), row["origin"])
        )
    return found
