"""When a shard updates, by how much of what it was given, and when it answers (Arnold 2016, section 3.3)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class UpdateRule(ABC):
    """holds: answers wait for the update. mean: an update is by the mean of what was given for it, not by the sum."""

    holds: bool = False
    mean: bool = False

    @classmethod
    def build(cls, config: Any) -> UpdateRule:
        """A rule as configured; config: the section `exchange`."""
        return cls()

    def share(self, staleness: int) -> float:
        """How much of a step a push is worth whose parameters were so many updates old."""
        return 1.0

    def late(self, staleness: int) -> bool:
        """Whether such a push comes too late to count."""
        return False

    @abstractmethod
    def due(self, pushes: int, expected: int) -> bool:
        """Whether it is time to update, with so many pushes of `expected` workers, those that rest left out."""


class Asynchronous(UpdateRule):
    """As soon as a bundle of pushes is full (one: at once), and nobody waits for it."""

    def __init__(self, bundle: int) -> None:
        self._bundle = bundle

    @classmethod
    def build(cls, config: Any) -> UpdateRule:
        return cls(config.bundle or 1)

    def due(self, pushes: int, expected: int) -> bool:
        return pushes >= self._bundle


class StalenessAware(Asynchronous):
    """Steps are divided by staleness (Zhang et al. 2016)."""

    def share(self, staleness: int) -> float:
        return 1.0 / max(1, staleness)


class SoftSync(Asynchronous):
    """By the mean of n pushes, whoever they are from: between asynchronous, n = 1, and synchronous, n = the workers."""

    mean = True


class Rounds(UpdateRule):
    """All workers of a round but the slowest few, whose pushes are dropped when they come (Chen et al. 2016)."""

    holds = mean = True

    def __init__(self, backup: int) -> None:
        self._backup = backup

    @classmethod
    def build(cls, config: Any) -> UpdateRule:
        return cls(config.backup or 0)

    def late(self, staleness: int) -> bool:
        return staleness > 0 and self._backup > 0

    def due(self, pushes: int, expected: int) -> bool:
        return pushes >= max(1, expected - self._backup)


RULES: dict[str, type[UpdateRule]] = {
    "async": Asynchronous,
    "staleness-aware": StalenessAware,
    "softsync": SoftSync,
    "rounds": Rounds,
}
