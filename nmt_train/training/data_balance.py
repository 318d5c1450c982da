"""What rank 0 knows of how far all workers are in the data, and when what is left is to be dealt out anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from nmt_train.corpus.data_shard import Position, plain, resume
from nmt_train.run.progress import Progress
from nmt_train.training.follower import LEAD, last_epoch
from nmt_train.training.worker import Worker

_TIMES_AT_END = 4  # that what is left of the last epoch is dealt out again


class DataBalancer:
    """`positions`: of all that train, as far as they have reported."""

    def __init__(self, worker: Worker, progress: Progress) -> None:
        self._worker, self._progress, self._config = worker, progress, worker.config
        self.positions = [Position() for _ in range(worker.transport.size)]
        self._settled: dict[int, Position] = {}  # of the others, less what may still be under way
        self._apart_matters = worker.transport.size > 1 and not worker.schedule.exchange.synchronous
        self._limit = last_epoch(self._config.stop)
        self._evened_at_end = 0

    def begin(self, stages: Sequence[Sequence[Position]], size: int) -> None:
        """So many workers go on from where those stopped that `stages` has last."""
        self.positions = [resume(rank, stages, size)[1] for rank in range(size)]

    def heard(self, rank: int, position: Sequence[int], settled: Sequence[int]) -> None:
        if rank < len(self.positions):  # it has joined
            self.positions[rank] = Position(*position)
            self._settled[rank] = Position(*settled)

    def count(self) -> bool:
        """Bring the run's position in the data up to date; whether an epoch is complete."""
        self.positions[0] = self._worker.position
        epochs = min(position.epochs for position in self.positions)
        ended = epochs > self._progress.epochs
        self._progress.at(epochs, sum(position.batches for position in self.positions if position.epochs == epochs))
        return ended

    def too_far(self) -> bool:
        """Whether rank 0 must wait for a slower worker."""
        epoch = self._worker.position.epochs
        return self._apart_matters and (epoch >= self._limit or epoch > self._progress.epochs + LEAD)

    def workers(self) -> int:
        """How many are to train by now."""
        waves = self._config.exchange.join
        return self._worker.transport.size if waves is None else waves.workers(self._progress)

    def grows(self) -> bool:
        return self.workers() > self._worker.data_shard.size

    def apart(self) -> bool:
        """Whether a worker is so far behind that the others wait, or soon will: some of what it has left is to be theirs.

        Not where workers wait for each other anyway. At the end each time leaves it less, until waiting for it is cheaper.
        """
        if not self._apart_matters or self._worker.schedule.exchange.waits_for_others:
            return False
        furthest = max(position.epochs for position in self.positions)
        if furthest >= self._limit:
            return self._progress.epochs < furthest and self._evened_at_end < _TIMES_AT_END
        return furthest > self._progress.epochs + LEAD

    def anew(self) -> dict[str, Any]:
        """Deal what is left to all that are to train by now; what the others are to be told. All must be drained."""
        self._evened_at_end += max(position.epochs for position in self.positions) >= self._limit
        workers, stages = self.workers(), [*self._worker.data_shard.stages, list(self.positions)]
        self._worker.assign(*resume(0, stages, workers, anew=True))
        self._settled.clear()
        self.positions = [resume(rank, stages, workers, anew=True)[1] for rank in range(workers)]
        return {"workers": workers, "stages": plain(stages)}

    def facts(self) -> dict[str, Any]:
        """Where all are for certain, as JSON."""
        settled = dict(enumerate(self.positions)) | self._settled | {0: self._worker.settled_position}
        positions = [astuple(settled[rank]) for rank in range(len(self.positions))]
        return {"positions": positions, "stages": plain(self._worker.data_shard.stages), "deals": self._worker.assignments}
