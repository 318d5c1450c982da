"""Copies of shards in the memory of other machines, so that what a process held outlives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer
from pydantic.dataclasses import dataclass

from nmt_train.common.duration import Mark, Span
from nmt_train.common.section import STRICT
from nmt_train.distributed.exchange.recovery_piece import RecoveryPiece
from nmt_train.distributed.transport import Future, Tag, Transport
from nmt_train.optim.optimizer import Optimizer


def _interval(given: Any) -> Span:
    span = Span.parse(given)
    if span.unit in "et":
        raise ValueError(f"{given!r}: copies are made every so many updates, or in time: write 100u, 30s or 2m")
    return span


@dataclass(frozen=True, config=STRICT)
class RecoveryConfig:
    """Copies of shards, from which training continues after processes have ended (mpirun --with-ft ulfm)."""

    copies: int = Field(
        default=1, ge=0, le=1, description="number of copies of each shard, with its optimizer, in another machine's memory"
    )
    every: Annotated[Span, BeforeValidator(_interval), PlainSerializer(str)] = Field(
        default=Span.parse("30s"),
        description="interval between two copies of a shard, as 100u or 30s: at most so much of it can be lost",
    )


def keeper(rank: int, nodes: Sequence[int]) -> int:
    """Which rank keeps the copy of a rank's shard: one of the next machine, or, if there is one machine, the next rank."""
    count = max(nodes) + 1
    if count == 1:
        return (rank + 1) % len(nodes)
    theirs = [other for other, node in enumerate(nodes) if node == (nodes[rank] + 1) % count]
    place = [other for other, node in enumerate(nodes) if node == nodes[rank]].index(rank)
    return theirs[place % len(theirs)]


class Replication:
    """Of several ranks, sends copies of this one's shard, and keeps those of others' (`kept`, by rank).

    A copy leaves only when the one before has arrived, piece by piece between training's own messages.
    """

    def __init__(self, transport: Transport, shards: Sequence[slice], config: RecoveryConfig) -> None:
        self._transport, self._shard, self._every = transport, shards[transport.rank], config.every
        self._keeper = keeper(transport.rank, transport.nodes)
        self.copies: dict[int, RecoveryPiece] = {}
        self._leaving: Future[None] | None = None
        self._last: Mark | None = None  # when the last one left
        transport.spawn("copies", self._keep)

    def updated(self, optimizer: Optimizer) -> None:
        """After an update of the shard: copy it if it is time to."""
        now = Mark(0, optimizer.updates, 0, self._transport.now())
        due = self._last is None or self._every.crossed(self._last, now)
        if due and (self._leaving is None or self._leaving.done()):
            self._last = now
            self._leaving = self._transport.send(self._keeper, Tag.COPY, RecoveryPiece.of(self._shard, optimizer).pack())

    def _keep(self) -> None:
        while True:
            source, message = self._transport.receive(None, Tag.COPY).result()
            self.copies[source] = RecoveryPiece.unpack(message)
