"""On rank 0: tracks the data position of every worker, and decides when to redistribute the remaining batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any, NamedTuple

from nmt_train.corpus.data_shard import Position, plain, resume
from nmt_train.run.progress import Progress
from nmt_train.training.worker import LEAD, Worker

_TIMES_AT_END = 4  # maximum number of redistributions in the last epoch


class _Epochs:
    """In which epochs the workers are: how many in which, and how many batches of it they have done in all.

    Updated by each report, in a time that does not grow with the number of workers.
    """

    def __init__(self, positions: Sequence[Position]) -> None:
        self._places = [astuple(position) for position in positions]
        self._workers, self._batches = Counter[int](), Counter[int]()
        for epochs, batches in self._places:
            self._workers[epochs] += 1
            self._batches[epochs] += batches

    def move(self, worker: int, position: Position) -> None:
        epochs, batches = self._places[worker]
        self._workers[epochs] -= 1
        self._batches[epochs] -= batches
        if not self._workers[epochs]:
            del self._workers[epochs], self._batches[epochs]
        self._places[worker] = position.epochs, position.batches
        self._workers[position.epochs] += 1
        self._batches[position.epochs] += position.batches

    @property
    def slowest(self) -> int:
        """The epochs that all workers have completed."""
        return min(self._workers)

    @property
    def furthest(self) -> int:
        """The epochs that at least one worker has completed."""
        return max(self._workers)

    def batches(self, epoch: int) -> int:
        """The batches done by the workers that are in `epoch`."""
        return self._batches[epoch]


class _Settled(NamedTuple):
    """A worker's settled position (see `Worker.settled_position`), the updates it knew of, and its position before them."""

    position: Position
    updates: int
    before: Position


class DataBalancer:
    """`positions`: the last reported data position of each training worker."""

    def __init__(self, worker: Worker, progress: Progress) -> None:
        self._worker, self._progress = worker, progress
        self._place([Position() for _ in range(worker.transport.size)])
        self._settled: dict[int, _Settled] = {}  # by rank, without rank 0
        self._several = worker.transport.size > 1
        self._evened_at_end = 0

    def begin(self, stages: Sequence[Sequence[Position]], size: int) -> None:
        """Set the positions from which `size` workers continue; the last entry of `stages` says where the workers stopped."""
        self._place([resume(rank, stages, size)[1] for rank in range(size)])

    def _place(self, positions: list[Position]) -> None:
        self.positions, self._epochs = positions, _Epochs(positions)

    def heard(self, rank: int, position: Position, settled: Position, updates: int) -> None:
        """updates: the number that the rank knows of."""
        if rank < len(self.positions):  # it has joined
            last = self._settled.get(rank) or _Settled(self.positions[rank], -1, self.positions[rank])
            before = last.position if updates > last.updates else last.before
            self.positions[rank], self._settled[rank] = position, _Settled(settled, updates, before)
            self._epochs.move(rank, position)

    def count(self) -> bool:
        """Update the run's data position; returns whether all workers have just completed an epoch."""
        self.positions[0] = self._worker.position
        self._epochs.move(0, self._worker.position)
        epochs = self._epochs.slowest
        ended = epochs > self._progress.epochs
        self._progress.at(epochs, self._epochs.batches(epochs))
        return ended

    def too_far(self) -> bool:
        """Whether rank 0 must wait for a slower worker."""
        return self._several and self._worker.too_far_ahead(self._progress.epochs)

    def workers(self) -> int:
        """How many workers should train at the current progress."""
        return self._worker.plan.waves.workers(self._progress)

    def grows(self) -> bool:
        return self.workers() > self._worker.data_shard.size

    def needs_redistribution(self) -> bool:
        """Whether a worker is so far behind that the others wait for it or soon will, so that batches must be redistributed.

        Always False if workers wait for each other anyway. In the last epoch, each redistribution leaves the
        slow worker fewer batches; after the last one, waiting for it is cheaper than redistributing again.
        """
        if not self._several or self._worker.plan.workers_wait:
            return False
        furthest = self._epochs.furthest
        if furthest >= self._worker.last_epoch:
            return self._progress.epochs < furthest and self._evened_at_end < _TIMES_AT_END
        return furthest > self._progress.epochs + LEAD

    def redistribute(self, workers: int) -> dict[str, Any]:
        """Redistribute the remaining batches to the first `workers` ranks; returns the facts for the other ranks.

        All workers must be drained.
        """
        self._evened_at_end += self._epochs.furthest >= self._worker.last_epoch
        stages = [*self._worker.data_shard.stages, list(self.positions)]
        self._worker.assign(*resume(0, stages, workers, redistribute=True))
        self._settled.clear()
        self._place([resume(rank, stages, workers, redistribute=True)[1] for rank in range(workers)])
        return {"workers": workers, "stages": plain(stages)}

    def facts(self) -> dict[str, Any]:
        """For each worker, the position in the data up to which no gradient can be in flight; and the stages. As JSON.

        ahead: by rank, the updates that a worker had seen at this position, and its position before them.
        """
        settled = dict(enumerate(self.positions)) | {rank: its.position for rank, its in self._settled.items()}
        settled[0] = self._worker.settled_position
        return {
            "positions": [astuple(settled[rank]) for rank in range(len(self.positions))],
            "ahead": {str(rank): [its.updates, *astuple(its.before)] for rank, its in self._settled.items()},
            "stages": plain(self._worker.data_shard.stages),
            "assignments": self._worker.assignments,
        }
