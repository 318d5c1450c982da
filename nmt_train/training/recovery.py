"""Recovery from ended ranks: the surviving ranks combine the state that they hold and redistribute it among themselves.

Every rank tells all others what it has: its shard, the copies that it keeps, and the last parameters that it received from the
other shards; or, where every rank has all parameters, its replica. From this, all ranks derive the same plan of transfers. For
every part of the parameters, the plan prefers exact versions, and among these the newest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial

import torch

from nmt_train.common.message import Message
from nmt_train.corpus.data_shard import DataShard, Position, resume
from nmt_train.optim.flat_model import cpu_copy
from nmt_train.run.progress import Progress
from nmt_train.strategy.recovery_piece import RecoveryPiece
from nmt_train.strategy.state import Vectors, WorkerState
from nmt_train.strategy.strategy import Strategy
from nmt_train.training.recovery_plan import Facts, Inventory, Move
from nmt_train.training.snapshot import RankState, Snapshot
from nmt_train.training.worker import Worker
from nmt_train.transport import Messages, Tag


@dataclass
class SurvivorState:
    """The state that a surviving rank keeps from the failure of other ranks until all surviving ranks train again.

    ranks: this rank's number in each generation of the transport, oldest first.
    generation: the generation in which the worker recorded `settled`; -1 if it had not received its part.
    settled: the worker's position, without batches whose gradients may have been in flight.
    assignments: the number of the assignment of batches to which `settled` belongs.
    repeated_batches: batches trained after `settled`.
    leader: the state that a rank 0 continues from (see leader.py), as far as this rank knows it, with its generation.
    strategy: the worker's, until `let_go`.
    frozen: the parameters that the model does not train.
    worker_state, in_doubt: see `Strategy.rescue`; the second counts only if no rank has made more than `updates` updates.
    updates: the number of updates that this rank knows of.
    lost: updates lost by an earlier recovery that was interrupted before the loss was logged.
    size: the number of ranks before the failure.
    """

    ranks: list[int]
    generation: int
    recovery_pieces: list[RecoveryPiece]
    settled: Position
    assignments: int
    repeated_batches: int
    random: Vectors
    leader: Facts | None
    frozen: torch.Tensor = field(default_factory=partial(torch.empty, 0))
    strategy: Strategy | None = None
    worker_state: WorkerState = field(default_factory=WorkerState)
    in_doubt: WorkerState = field(default_factory=WorkerState)
    updates: int = 0
    lost: int = 0
    size: int = 1

    @classmethod
    def of(cls, worker: Worker, ranks: list[int]) -> SurvivorState:
        """The state of a worker whose transport raised Ended. ranks: the caller appends later rank numbers to this list."""
        generation, told = len(ranks) - 1, worker.leader and worker.leader()
        leader = told and {"generation": generation, **told}
        where = worker.settled_position, worker.assignments, worker.unsettled_batches, worker.random()
        if not worker.has_part:
            return cls(ranks, -1, [], *where, leader)
        frozen = cpu_copy(worker.flat.frozen.vector)
        return cls(ranks, generation, [], *where, leader, frozen, worker.strategy, size=worker.transport.size)

    def let_go(self) -> None:
        """Copy the worker's vectors to the CPU, and drop the reference to its strategy.

        The worker's tasks must have ended: until then, they write to these vectors.
        """
        if self.strategy is not None:
            strategy, self.strategy = self.strategy, None
            self.recovery_pieces, self.updates = strategy.pieces(), strategy.updates
            self.worker_state, self.in_doubt = (state.each(cpu_copy) for state in strategy.rescue())

    def owed(self, newest: int) -> WorkerState:
        """The state to continue with: without what an update of another rank includes.

        newest: the highest number of updates that any rank knows of. This survivor keeps its own until all train again, because
        the recovery may be interrupted after a worker has loaded, and cleared, what this returns.
        """
        return self.worker_state.plus(self.in_doubt if self.updates == newest else WorkerState())

    def forget(self) -> None:
        """Free the memory. Called once all surviving ranks train again."""
        self.recovery_pieces, self.random, self.worker_state, self.in_doubt = [], {}, WorkerState(), WorkerState()
        self.frozen = torch.empty(0)

    def facts(self) -> Facts:
        pieces = [piece.facts() for piece in self.recovery_pieces]
        return {
            "generation": self.generation, "ranks": self.ranks, "pieces": pieces, "lost": self.lost,
            "settled": astuple(self.settled), "assignments": self.assignments, "repeated_batches": self.repeated_batches,
            "leader": self.leader, "updates": self.updates,
        }  # fmt: skip


@dataclass
class RecoveredState:
    """The state from which a worker continues after a recovery.

    Equal on all ranks: leader (the state that rank 0 continues from), lost (the number of lost updates) and repeated_batches
    (the number of batches that are trained again).
    """

    part: RankState
    data_shard: DataShard
    stages: list[list[Position]]
    leader: Facts
    lost: int
    repeated_batches: int


def recover(worker: Worker, survivor: SurvivorState) -> RecoveredState | None:
    """Get this rank's part of the state of all surviving ranks, over the new worker's transport. All ranks call this together.

    Returns None on every rank if training had not begun: it then starts from the beginning. Raises Lost if some of the
    parameters are on no surviving rank.
    """
    transport, strategy, plan = worker.transport, worker.strategy, worker.plan
    inventory = Inventory.gather(transport, survivor.facts(), worker.flat.parameters.numel())
    if not inventory.begun:
        return None
    worker.flat.frozen.vector.copy_(survivor.frozen)
    worker.flat.frozen.use()
    moves = inventory.plan(strategy.slices)
    shard = _exchange(transport, strategy.slices[transport.rank], survivor.recovery_pieces, moves)
    stages, numbers = inventory.stages(), inventory.numbers()
    if numbers is None:  # no rank has the optimizer's state
        forgotten, numbers = strategy.optimizer.zero_state(inventory.newest)
        shard = {name: cpu_copy(vector) for name, vector in forgotten.items()} | shard
    progress = Progress(**inventory.leader["progress"])
    training = plan.waves.workers(progress)
    data_shard, position = resume(transport.rank, stages, training)
    data_shard = DataShard(data_shard.rank, training, data_shard.stages, plan.synchronous)
    owed = survivor.owed(inventory.newest)
    if plan.synchronous and owed.residual is not None:  # of a mean, it adds the share of one worker, as before
        owed = replace(owed, residual=owed.residual * (transport.size / survivor.size))
    part = RankState(shard, owed, survivor.random, numbers, position)
    if transport.size == 1:  # with one rank, the optimizer state may belong elsewhere: at the shard or at the worker
        snapshot = Snapshot(shard, numbers, [part.worker_state], [part.random], stages)
        part = snapshot.with_optimizer_at(strategy.optimizer.adds_updates).split(strategy.slices, workers=training)[0]
    return RecoveredState(part, data_shard, stages, inventory.leader, inventory.lost(moves), inventory.repeated_batches)


def _exchange(transport: Messages, place: slice, pieces: Sequence[RecoveryPiece], moves: Sequence[Move]) -> Vectors:
    """Send and receive as planned; return the slice `place`, which this rank will hold, of each vector."""
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
