"""Update rules: when a shard updates, how much each push counts, and when the shard answers (Arnold 2016, section 3.3)."""

from __future__ import annotations

from abc import ABC, abstractmethod


class UpdateRule(ABC):
    """When shards update.

    holds: a worker's answer waits until its push is applied. mean: an update always uses the mean of its pushes.
    bundle: the default of `server.bundle`.
    """

    holds: bool = False
    mean: bool = False
    bundle: int = 1

    @classmethod
    def build(cls, bundle: int, backup: int) -> UpdateRule:
        """A rule with the values of `server.bundle` and `server.backup`."""
        return cls()

    def share(self, staleness: int) -> float:
        """The fraction of a step for which a push with this staleness counts; staleness: age of its parameters in updates."""
        return 1.0

    def late(self, staleness: int) -> bool:
        """Whether a push with this staleness comes too late to count."""
        return False

    @abstractmethod
    def due(self, pushes: int, expected: int) -> bool:
        """Whether to update now. pushes: number of waiting pushes. expected: number of workers that have not left the round."""


class Asynchronous(UpdateRule):
    """Updates as soon as a bundle of pushes is full (with 1: at every push); no worker waits for it."""

    def __init__(self, bundle: int) -> None:
        self._bundle = bundle

    @classmethod
    def build(cls, bundle: int, backup: int) -> UpdateRule:
        return cls(bundle)

    def due(self, pushes: int, expected: int) -> bool:
        return pushes >= self._bundle


class StalenessAware(Asynchronous):
    """Divides the step of each push by its staleness (Zhang et al. 2016)."""

    def share(self, staleness: int) -> float:
        return 1.0 / max(1, staleness)


class SoftSync(Asynchronous):
    """Updates by the mean of n pushes from any workers: between asynchronous (n = 1) and synchronous (n = all workers)."""

    mean = True
    bundle = 2


class Rounds(UpdateRule):
    """Updates when all workers except the slowest `backup` have pushed; drops their late pushes (Chen et al. 2016)."""

    holds = mean = True

    def __init__(self, backup: int) -> None:
        self._backup = backup

    @classmethod
    def build(cls, bundle: int, backup: int) -> UpdateRule:
        return cls(backup)

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
