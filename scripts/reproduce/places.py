"""The places where scripts/tune trains systems: a task and a simulated cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

CONFIG, TATOEBA, CLUSTERS = "configs/comparison-virtual.yml", "configs/comparison-tatoeba.yml", "configs/clusters"
FAST, SLOW, SLOWEST, FASTEST = "1 Gbit/s", "100 Mbit/s", "10 Mbit/s", "10 Gbit/s"
NETWORKS = (FAST, SLOW, SLOWEST)  # where systems are tuned, the fastest first
STRAGGLER, JITTER = "straggler", "jitter"
THESIS_4X2, THESIS_7X1 = "thesis 4x2", "thesis 7x1"
MACHINES = {number: f"tatoeba {number}" for number in (1, 2, 4, 8, 16)}
_TOKENS, _WORKERS = 448, 4


@dataclass(frozen=True)
class Place:
    """A task and a cluster.

    options: of both. alone: the name of the place whose runs of one machine are the measure. tokens: of one batch.
    tuned_at: the name of the place where systems are tuned; empty: here.
    """

    cluster: str
    options: tuple[str, ...]
    alone: str
    tokens: int = _TOKENS
    workers: int = _WORKERS
    config: str = CONFIG
    tuned_at: str = ""

    def vocabulary(self, folder: Path) -> Path:
        """The vocabulary of the task, in the folder of all runs."""
        return folder / f"vocabulary{'' if self.config == CONFIG else '-' + Path(self.config).stem}.model"

    def differs_in_network(self, other: Place) -> bool:
        """Whether at most the network and the speeds of the machines differ."""
        return replace(self, options=(), tuned_at="") == replace(other, options=(), tuned_at="")

    def updates(self, singly: bool) -> float:
        """How many updates a run has, as a multiple of those of a run with as many words on the league's cluster.

        singly: an update has the batch of one worker, not the batches of all.
        """
        return _TOKENS / self.tokens * (1 if singly else _WORKERS / self.workers)


def _league(bandwidth: str, *more: str, tuned_at: str = "") -> Place:
    return Place(f"{CLUSTERS}/league.yml", (f"cluster.network.bandwidth={bandwidth}", *more), FAST, tuned_at=tuned_at)


def _thesis(name: str, workers: int) -> Place:
    """The thesis's batches of 64 sentences had 1,040 tokens on average."""
    return Place(f"{CLUSTERS}/thesis-{name}.yml", ("batch.tokens=1040",), THESIS_4X2, 1040, workers)


def _tatoeba(machines: int) -> Place:
    """This number of the league's machines at 1 Gbit/s. The options of system `one machine` say that there is one."""
    nodes = () if machines == 1 else (f"cluster.nodes={machines} x 1",)
    options = (*nodes, "cluster.network.bandwidth=1 Gbit/s")
    return Place(f"{CLUSTERS}/league.yml", options, MACHINES[1], workers=machines, config=TATOEBA)


PLACES = {
    **{bandwidth: _league(bandwidth) for bandwidth in NETWORKS},
    FASTEST: _league(FASTEST, tuned_at=FAST),
    STRAGGLER: _league(FAST, "cluster.stragglers=[{rank: 3, factor: 4}]", tuned_at=FAST),
    JITTER: _league(FAST, "cluster.jitter=0.2", tuned_at=FAST),
    THESIS_4X2: _thesis("4x2", 8),
    THESIS_7X1: _thesis("7x1", 7),
    **{name: _tatoeba(machines) for machines, name in MACHINES.items()},
}
