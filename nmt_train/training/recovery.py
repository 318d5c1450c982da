"""Recovery from ended ranks: the surviving ranks combine the state that they hold and redistribute it among themselves.

Every rank tells all others what it has: its shard, the copies that it keeps, and the last parameters that it received of the
other shards. From this all ranks derive the same plan of which rank sends what to which. The plan uses the newest version of
everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from nmt_train.corpus.data_shard import DataShard, Position, from_plain, resume
from nmt_train.distributed.exchange.exchange import Exchange, Vectors
from nmt_train.distributed.exchange.recovery_piece import RecoveryPiece
from nmt_train.distributed.message import Message, from_json, to_facts
from nmt_train.distributed.schedule.schedule import Schedule
from nmt_train.distributed.transport import Lost, Messages, Tag
from nmt_train.optim.flat_model import kept
from nmt_train.run.progress import Progress
from nmt_train.training.snapshot import RankState, Snapshot
from nmt_train.training.worker import Worker

Facts = dict[str, Any]
_PARAMETERS, _MEAN = "parameters", "smoothed"


@dataclass
class SurvivorState:
    """What a surviving rank holds of the run, from the end of other ranks until all surviving ranks have begun again.

    ranks: this rank's numbers, one for each generation of the transport, from the first start of the run to the present one.
    generation: the generation in which the worker recorded `settled`; -1 if it had not received its part.
    settled: the worker's position, without batches whose gradients may have been in flight.
    assignments: the number of the assignment of batches to which `settled` belongs.
    repeated_batches: batches trained after `settled`.
    leader: the state that a rank 0 continues from (see leader.py), as far as this rank knows it, with its generation.
    schedule: the worker's schedule, until `let_go`.
    worker_state: what the worker owes the others or keeps for itself.
    in_doubt: what the worker owes in addition if no rank has made more than `updates` updates.
    lost: updates that an earlier recovery lost. That recovery ended before all ranks had begun, so that nobody logged the loss.
    """

    ranks: list[int]
    generation: int
    recovery_pieces: list[RecoveryPiece]
    settled: Position
    assignments: int
    repeated_batches: int
    random: Vectors
    leader: Facts | None
    schedule: Schedule | None = None
    worker_state: Vectors = field(default_factory=dict)
    in_doubt: Vectors = field(default_factory=dict)
    updates: int = 0
    lost: int = 0

    @classmethod
    def of(cls, worker: Worker, ranks: list[int]) -> SurvivorState:
        """ranks: the caller appends this rank's later numbers to the same list."""
        generation, told = len(ranks) - 1, worker.leader and worker.leader()
        leader = told and {"era": generation, **told}
        where = worker.settled_position, worker.assignments, worker.unsettled_batches, worker.random()
        if not worker.placed:
            return cls(ranks, -1, [], *where, leader)
        return cls(
            ranks, generation, worker.schedule.exchange.recovery_pieces(worker.transport.rank), *where, leader, worker.schedule
        )

    def let_go(self) -> None:
        """Copy what is needed of the worker to the CPU, and release the worker. Its tasks have ended."""
        if self.schedule is not None:
            owing, self.schedule = self.schedule, None
            self.updates = owing.exchange.updates
            self.worker_state, self.in_doubt = (
                {name: kept(vector) for name, vector in group.items()} for group in (owing.rescued(), owing.in_doubt())
            )

    def rescued(self, newest: int) -> Vectors:
        """What the worker owes and keeps; newest: the highest number of updates that any rank knows of."""
        owed = self.in_doubt if self.updates == newest else {}
        owed = {name: self.worker_state[name] + way if name in self.worker_state else way for name, way in owed.items()}
        return self.worker_state | owed

    def forget(self) -> None:
        """Free the memory, once all surviving ranks have begun again."""
        self.recovery_pieces, self.random, self.worker_state, self.in_doubt = [], {}, {}, {}

    def facts(self) -> Facts:
        pieces = [piece.facts() for piece in self.recovery_pieces]
        told = {
            "settled": astuple(self.settled),
            "deals": self.assignments,
            "again": self.repeated_batches,
            "leader": self.leader,
        }
        return {"era": self.generation, "ranks": self.ranks, "pieces": pieces, "lost": self.lost, **told}


@dataclass(frozen=True)
class Source:
    """A description, known to all ranks, of one recovery piece that a rank holds."""

    rank: int
    number: int
    start: int
    stop: int
    updates: int
    names: Sequence[str]
    exact: bool
    whole: bool  # whether it includes the optimizer's whole state


@dataclass(frozen=True)
class Move:
    """A transfer of a part of one of a source's vectors to a rank; taken: the vector's name at the source."""

    source: Source
    name: str
    taken: str
    start: int
    stop: int
    receiver: int


@dataclass
class Inventory:
    """What every surviving rank has said that it holds, indexed by the rank's present number."""

    said: list[Facts]

    @classmethod
    def gather(cls, transport: Messages, survivor: SurvivorState) -> Inventory:
        """Rank 0 receives the facts of every rank and sends all of them to every rank."""
        if transport.rank == 0:
            mine = survivor.facts()
            said = [mine] + [
                to_facts(transport.receive(rank, Tag.HELLO).result()[1], *mine) for rank in range(1, transport.size)
            ]
            for rank in range(1, transport.size):
                transport.send(rank, Tag.HELLO, from_json({"said": said}))
            return cls(said)
        transport.send(0, Tag.HELLO, from_json(survivor.facts()))
        return cls(to_facts(transport.receive(0, Tag.HELLO).result()[1], "said")["said"])

    @property
    def begun(self) -> bool:
        """Whether any rank knows that training had begun."""
        return any(facts["leader"] is not None for facts in self.said)

    @cached_property
    def leader(self) -> Facts:
        """The newest state known to any rank from which rank 0 can continue."""
        known = [facts["leader"] for facts in self.said if facts["leader"] is not None]
        newest: Facts = max(known, key=lambda its: (its["era"], its["deals"], its["progress"]["tokens"]))
        return newest

    def stages(self) -> list[list[Position]]:
        """The earlier stages, followed by the positions where all workers stopped, both surviving and ended ones."""
        leader = self.leader
        positions = from_plain([leader["positions"]])[0]
        for facts in self.said:
            rank = facts["ranks"][leader["era"]]
            # A rank with another assignment than the leader's had not received the newer one, and has trained no batch of it:
            # the leader's own record of its position stands.
            known = (facts["era"], facts["deals"]) == (leader["era"], leader["deals"])
            if known and rank < len(positions):
                positions[rank] = Position(*facts["settled"])
        return [*from_plain(leader["stages"]), positions]

    @cached_property
    def sources(self) -> list[Source]:
        return [
            Source(rank, number, start, stop, piece["updates"], piece["names"], piece["exact"], piece["numbers"] is not None)
            for rank, facts in enumerate(self.said) for number, piece in enumerate(facts["pieces"])
            for start, stop in [piece["place"]] if start < stop
        ]  # fmt: skip

    @property
    def newest(self) -> int:
        """The highest number of updates that any rank knows of."""
        return max(self.leader["updates"], *(source.updates for source in self.sources))

    def numbers(self) -> dict[str, Any] | None:
        """The optimizer's counters, from the newest source that has them; None if no source does."""
        whole = [source for source in self.sources if source.whole]
        newest = max(whole, key=lambda source: (source.updates, -source.rank), default=None)
        if newest is None:
            return None
        numbers: dict[str, Any] = self.said[newest.rank]["pieces"][newest.number]["numbers"]
        return numbers

    def plan(self, wanted: Sequence[slice]) -> list[Move]:
        """Plan which rank sends what, so that every rank gets all available state of its slice in `wanted`.

        Where a shard was lost together with its copy, its optimizer state restarts at zero. Raises Lost if no rank has some of
        the parameters.
        """
        sources = self.sources
        names = {_PARAMETERS}.union(*(source.names for source in sources if source.whole))
        borders = sorted({place for source in sources for place in (source.start, source.stop)})
        moves: list[Move] = []
        for receiver, target in enumerate(wanted):
            cuts = [target.start, *(place for place in borders if target.start < place < target.stop), target.stop]
            for name in sorted(names) if target.start < target.stop else []:
                for start, stop in pairwise(cuts):
                    there = [source for source in sources if source.start <= start and stop <= source.stop]
                    able, taken = [source for source in there if name in source.names], name
                    if not able and name == _MEAN:  # the running mean restarts from the parameters
                        able, taken = [source for source in there if _PARAMETERS in source.names], _PARAMETERS
                    if able:
                        moves.append(Move(max(able, key=_worth(receiver)), name, taken, start, stop, receiver))
                    elif name == _PARAMETERS:
                        raise Lost(
                            "all ranks ended that knew some of the parameters; start the same command again: it continues from"
                            " the last checkpoint"
                        )
        return moves

    @property
    def repeated_batches(self) -> int:
        """Batches that surviving ranks will train again, because their gradients may have been in flight."""
        return sum(int(facts["again"]) for facts in self.said)

    def lost(self, moves: Sequence[Move]) -> int:
        """The most updates that any recovered parameters lack because their owner ended and an older version replaced them."""
        taken = [move.source.updates for move in moves if move.name == _PARAMETERS and move.source.number]
        before = max(int(facts["lost"]) for facts in self.said)
        return max([before, *(self.newest - updates for updates in taken)])


def _worth(receiver: int) -> Callable[[Source], tuple[int, ...]]:
    """A sort key that prefers exact sources, then newer ones, then whole ones, then the receiver's own.

    The receiver's own counts only if it is exact, since only then do equal numbers of updates mean equal values.
    """

    def worth(source: Source) -> tuple[int, ...]:
        own = source.exact and source.rank == receiver
        return (source.exact, source.updates, source.whole, own, -source.rank, -source.number)

    return worth


@dataclass
class RecoveredState:
    """The state from which a worker begins again.

    The same on all ranks: `leader`, the state that rank 0 continues from; `lost`, the number of lost updates; and
    `repeated_batches`, the number of batches that are trained again.
    """

    part: RankState
    data_shard: DataShard
    stages: list[list[Position]]
    leader: Facts
    lost: int
    repeated_batches: int


def recover(worker: Worker, survivor: SurvivorState) -> RecoveredState | None:
    """Get this rank's part of the state of all surviving ranks, over the new worker's transport. All ranks call this together.

    Returns None on every rank if training had not begun: it then starts from the beginning. Raises Lost if no rank has some of
    the parameters.
    """
    transport, exchange = worker.transport, worker.schedule.exchange
    inventory = Inventory.gather(transport, survivor)
    if not inventory.begun:
        return None
    moves = inventory.plan(exchange.initial_slices)
    shard = _exchange(transport, exchange, survivor.recovery_pieces, moves)
    stages, numbers = inventory.stages(), inventory.numbers()
    if numbers is None:  # no rank has the optimizer's state
        forgotten, numbers = exchange.optimizer.anew(inventory.newest)
        shard = {name: kept(vector) for name, vector in forgotten.items()} | shard
    progress = Progress(**inventory.leader["progress"])
    waves = worker.config.exchange.join
    training = transport.size if waves is None else waves.workers(progress)
    data_shard, position = resume(transport.rank, stages, training)
    data_shard = DataShard(data_shard.rank, training, data_shard.stages, exchange.synchronous)
    part = RankState(shard, survivor.rescued(inventory.newest), survivor.random, numbers, position)
    if transport.size == 1:  # a single rank may keep its optimizer state elsewhere than several do
        snapshot = Snapshot(shard, numbers, [part.worker_state], [part.random], stages)
        part = snapshot.with_optimizer_at(exchange.optimizer.adds_updates).split(exchange.initial_slices, workers=training)[0]
    return RecoveredState(part, data_shard, stages, inventory.leader, inventory.lost(moves), inventory.repeated_batches)


def _exchange(transport: Messages, exchange: Exchange, pieces: Sequence[RecoveryPiece], moves: Sequence[Move]) -> Vectors:
    """Send and receive as planned; return this rank's vectors."""
    place = exchange.initial_slices[transport.rank]
    vectors = {move.name: torch.zeros(place.stop - place.start) for move in moves}
    sent = []
    for receiver in range(transport.size):
        mine = [move for move in moves if (move.source.rank, move.receiver) == (transport.rank, receiver)]
        parts = [_part(pieces[move.source.number], move) for move in mine]
        if receiver == transport.rank:
            _fill(vectors, place, mine, parts)
        elif parts:
            sent.append(transport.send(receiver, Tag.STATE, Message((), tuple(parts))))
    for sender in range(transport.size):
        theirs = [move for move in moves if (move.source.rank, move.receiver) == (sender, transport.rank)]
        if theirs and sender != transport.rank:
            message = transport.receive(sender, Tag.STATE).result()[1]
            _fill(vectors, place, theirs, message.vectors(*((torch.float32, move.stop - move.start) for move in theirs)))
    for done in sent:
        done.result()
    return vectors


def _part(piece: RecoveryPiece, move: Move) -> torch.Tensor:
    return piece.vectors[move.taken][move.start - piece.place.start : move.stop - piece.place.start]


def _fill(vectors: Vectors, place: slice, moves: Sequence[Move], parts: Sequence[torch.Tensor]) -> None:
    for move, part in zip(moves, parts, strict=True):
        vectors[move.name][move.start - place.start : move.stop - place.start] = part.to(vectors[move.name])
