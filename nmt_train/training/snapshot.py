"""The state of all ranks at one moment: gathered for a checkpoint, and distributed at the start."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from nmt_train.corpus.data_shard import Position, resume
from nmt_train.distributed.exchange.worker_state import Vectors, inherited, optimizer_to_shards, optimizer_to_workers
from nmt_train.distributed.message import Message, from_json, to_json
from nmt_train.distributed.transport import Future


@dataclasses.dataclass
class RankState:
    """One rank's part of the state that a run continues from; rank 0 also sends such parts at the start.

    Parts, snapshots, recovery pieces and received messages are always on the CPU, even if ranks compute on GPUs. The code that
    creates one copies the vectors of the device (`flat_model.cpu_copy`); the code that loads one copies them to its device.

    shard: by name, the rank's slice of `parameters`, of `smoothed` (if there is one) and of the optimizer's vectors.
    worker_state: vectors that the worker keeps, each as long as all parameters. random: the states of torch's generators.
    numbers: the optimizer's counters. position: the worker's position in the data.
    """

    shard: Vectors
    worker_state: Vectors
    random: Vectors
    numbers: dict[str, Any]
    position: Position

    def pack(self) -> Message:
        groups = {name: getattr(self, name) for name in ("shard", "worker_state", "random")}
        tensors = [tensor for group in groups.values() for tensor in group.values()]
        facts: dict[str, Any] = {name: list(group) for name, group in groups.items()}
        facts |= {"numbers": self.numbers, "position": dataclasses.astuple(self.position)}
        return Message((), (*from_json(facts).tensors, *tensors))

    @classmethod
    def unpack(cls, message: Message) -> RankState:
        with message.understood():
            facts, tensors = to_json(message), iter(message.tensors[1:])
            shard, worker_state, random = (
                {name: next(tensors) for name in facts[group]} for group in ("shard", "worker_state", "random")
            )
            return cls(shard, worker_state, random, facts["numbers"], Position(*facts["position"]))


@dataclasses.dataclass
class Snapshot:
    """The state of all ranks at one moment: global flat vectors (elements,) by name, and each worker's state.

    numbers: the optimizer's counters. stages: the data positions where workers stopped, one list for each distribution of the
    batches (see `DataShard`), oldest first; the last list holds the present positions.
    """

    vectors: Vectors
    numbers: dict[str, Any]
    worker_state: list[Vectors]
    random: list[Vectors]
    stages: list[list[Position]]

    @classmethod
    def join(
        cls,
        parts: list[RankState],
        shards: list[slice],
        elements: int,
        stages: Sequence[Sequence[Position]],
        workers: int | None = None,
    ) -> Snapshot:
        """Join the parts of all ranks.

        shards: each rank's slice of the `elements` parameters. stages: without the present positions. workers: how many of the
        ranks train (None: all).
        """
        if len(parts) == 1:
            vectors = parts[0].shard
        else:
            vectors = {name: torch.empty(elements) for name in parts[0].shard}
            for part, place in zip(parts, shards, strict=True):
                for name, vector in part.shard.items():
                    vectors[name][place] = vector
        positions = [*map(list, stages), [part.position for part in parts[:workers]]]
        return cls(vectors, parts[0].numbers, [p.worker_state for p in parts], [p.random for p in parts], positions)

    def with_optimizer_at(self, exchanges_updates: bool) -> Snapshot:
        """The same snapshot with the optimizer's vectors at every worker (if `exchanges_updates`), or else at the shards."""
        move = optimizer_to_workers if exchanges_updates else optimizer_to_shards
        vectors, numbers, workers = move(self.vectors, self.numbers, self.worker_state)
        return Snapshot(vectors, numbers, workers, self.random, self.stages)

    def split(
        self, shards: list[slice], exchanging: Sequence[int] | None = None, workers: int | None = None, means: bool = False
    ) -> list[RankState]:
        """Split the snapshot into one part for each of `shards`.

        exchanging: the ranks that exchange (None: all that train). They also take over the unsent residuals and updates of
        workers that no longer exist or do not exchange. workers: how many of the ranks train (None: all). means: residuals
        belong to a mean over all workers, not to a sum.
        """
        parts = []
        training = len(shards) if workers is None else workers
        exchanging = range(training) if exchanging is None else exchanging
        for rank, place in enumerate(shards):
            position = resume(rank, self.stages, training)[1]
            random = self.random[rank] if rank < len(self.random) else {}
            shard = {name: vector[place] for name, vector in self.vectors.items()}
            worker_state = inherited(self.worker_state, rank, exchanging, means, trains=rank < training)
            parts.append(RankState(shard, worker_state, random, self.numbers, position))
        return parts


class PendingSnapshot:
    """A snapshot that is being assembled: `own` is this rank's part; the other ranks' parts are still arriving."""

    def __init__(
        self, own: RankState, coming: Sequence[Future[tuple[int, Message]]], shards: list[slice],
        stages: Sequence[Sequence[Position]], positions: Sequence[Position],
    ) -> None:  # fmt: skip
        self.own, self.positions = own, [Position(**vars(position)) for position in positions]
        self._coming, self._shards, self._stages = coming, shards, stages
        self._snapshot: Snapshot | None = None

    def complete(self) -> bool:
        return all(part.done() for part in self._coming)

    def snapshot(self) -> Snapshot:
        """The whole snapshot; waits for the missing parts."""
        if self._snapshot is None:
            parts = [self.own, *(RankState.unpack(part.result()[1]) for part in self._coming)]
            elements = sum(place.stop - place.start for place in self._shards)
            self._snapshot = Snapshot.join(parts, self._shards, elements, self._stages, len(self.positions))
        return self._snapshot
