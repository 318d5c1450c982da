"""The state of all ranks at one moment: gathered for a checkpoint, and distributed at the start."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nmt_train.common.message import DTYPES, Message, from_json, to_facts
from nmt_train.corpus.data_shard import Position, resume
from nmt_train.strategy.state import Vectors, WorkerState, inherited, optimizer_to_shards, optimizer_to_workers

_PIECE = 1 << 24  # elements: the longest part of a vector in one message
_GROUPS = ("shard", "worker_state", "random")
Next = Callable[[], Message]  # waits for the next message of a series


class Piece(NamedTuple):
    """Consecutive elements of one vector of a rank's part. group: `shard`, `worker_state` or `random`; start: the first's."""

    group: str
    name: str
    start: int
    values: Tensor


@dataclasses.dataclass(frozen=True)
class Header:
    """What a rank's part consists of. vectors: by group and name, the type and the number of elements."""

    vectors: dict[str, dict[str, tuple[torch.dtype, int]]]
    numbers: dict[str, Any]
    position: Position

    def pack(self, **more: Any) -> Message:
        """more: further facts for the receiver, as JSON."""
        vectors = {
            group: {name: [str(dtype).removeprefix("torch."), length] for name, (dtype, length) in named.items()}
            for group, named in self.vectors.items()
        }
        return from_json({**more, "vectors": vectors, "numbers": self.numbers, "position": dataclasses.astuple(self.position)})

    @classmethod
    def unpack(cls, message: Message) -> Header:
        facts = to_facts(message, "vectors", "numbers", "position")
        types = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
        with message.understood():
            vectors = {
                group: {name: (types[dtype], int(length)) for name, (dtype, length) in facts["vectors"][group].items()}
                for group in _GROUPS
            }
            if any(length < 0 for named in vectors.values() for _, length in named.values()):
                raise ValueError("a vector of negative length")
            return cls(vectors, dict(facts["numbers"]), Position(*facts["position"]))

    def without(self, group: str) -> Header:
        """The header of the same part without one of its groups."""
        return dataclasses.replace(self, vectors={**self.vectors, group: {}})

    def places(self) -> Iterator[tuple[str, str, torch.dtype, range]]:
        """The group, name, type and elements of each piece, in the order in which they are sent."""
        for group, named in self.vectors.items():
            for name, (dtype, length) in named.items():
                for start in range(0, length, _PIECE):
                    yield group, name, dtype, range(start, min(start + _PIECE, length))

    def read(self, following: Next) -> Iterator[Piece]:
        """The pieces in the messages that follow this header. Raises Malformed if one is not as the header says."""
        for group, name, dtype, place in self.places():
            yield Piece(group, name, place.start, following().vector(len(place), dtype))


def vector_messages(vector: Tensor) -> Iterator[Message]:
    """A vector (elements,) in pieces, because it may be longer than one message can be."""
    for start in range(0, vector.numel(), _PIECE):
        yield Message((), (vector[start : start + _PIECE],))


def receive_vector(into: Tensor, following: Next) -> None:
    """The reverse of `vector_messages`; raises Malformed."""
    for start in range(0, into.numel(), _PIECE):
        part = into[start : start + _PIECE]
        part.copy_(following().vector(part.numel(), part.dtype))


@dataclasses.dataclass
class RankState:
    """One rank's part of the state that a run continues from; rank 0 also sends such parts at the start.

    Parts, snapshots, recovery pieces and received messages are always on the CPU, even if ranks compute on GPUs. The code that
    creates one copies the vectors of the device (`flat_model.cpu_copy`); the code that loads one copies them to its device.

    shard: by name, the rank's slice of `parameters`, of `smoothed` (if there is one) and of the optimizer's vectors.
    worker_state: what the worker keeps. random: the states of torch's generators.
    numbers: the optimizer's counters. position: the worker's position in the data.
    """

    shard: Vectors
    worker_state: WorkerState
    random: Vectors
    numbers: dict[str, Any]
    position: Position

    @property
    def header(self) -> Header:
        vectors = {
            group: {name: (vector.dtype, vector.numel()) for name, vector in named.items()}
            for group, named in self._groups().items()
        }
        return Header(vectors, self.numbers, self.position)

    def _groups(self) -> dict[str, Vectors]:
        return {"shard": self.shard, "worker_state": self.worker_state.vectors(), "random": self.random}

    def pieces(self, header: Header) -> Iterator[Piece]:
        """The pieces of the groups that are in `header`."""
        groups = self._groups()
        for group, name, _, place in header.places():
            yield Piece(group, name, place.start, groups[group][name][place.start : place.stop])

    def messages(self) -> Iterator[Message]:
        """The header, then the pieces: a part may be longer than one message can be."""
        yield self.header.pack()
        for piece in self.pieces(self.header):
            yield Message((), (piece.values,))

    @classmethod
    def receive(cls, following: Next) -> RankState:
        """The reverse of `messages`; raises Malformed."""
        header = Header.unpack(following())
        groups: dict[str, Vectors] = {
            group: {name: torch.empty(length, dtype=dtype) for name, (dtype, length) in named.items()}
            for group, named in header.vectors.items()
        }
        for group, name, start, values in header.read(following):
            groups[group][name][start : start + len(values)] = values
        state = WorkerState.of(groups["worker_state"])
        return cls(groups["shard"], state, groups["random"], header.numbers, header.position)


@dataclasses.dataclass
class Snapshot:
    """The state of all ranks at one moment: global flat vectors (elements,) by name, and each worker's state.

    numbers: the optimizer's counters. stages: the data positions where workers stopped, one list for each distribution of the
    batches (see `DataShard`), oldest first; the last list holds the present positions.
    """

    vectors: Vectors
    numbers: dict[str, Any]
    worker_state: list[WorkerState]
    random: list[Vectors]
    stages: list[list[Position]]

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


@dataclasses.dataclass
class PendingSnapshot:
    """A snapshot whose other parts are still at their ranks. own: this rank's part, a copy.

    slices: each rank's slice of the parameters. stages: as in `Snapshot`, without the present positions. positions: those of
    the ranks that train. seconds: how long training stood for the snapshot.
    """

    own: RankState
    slices: Sequence[slice]
    stages: Sequence[Sequence[Position]]
    positions: list[Position]
    seconds: float


def contributed(slices: Sequence[slice]) -> list[slice]:
    """What each rank contributes to a snapshot, if it holds these slices: a slice that several ranks hold, only the first."""
    return [slice(0, 0) if place.start < place.stop and place in slices[:rank] else place for rank, place in enumerate(slices)]
