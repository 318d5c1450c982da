"""Copies of shards in the memory of other machines, so that a shard survives the end of its process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer
from pydantic.dataclasses import dataclass

from nmt_train.common.duration import Duration, Mark, Pace
from nmt_train.common.section import STRICT
from nmt_train.distributed.exchange.recovery_piece import RecoveryPiece
from nmt_train.distributed.transport import Future, Tag, Transport
from nmt_train.optim.optimizer import Optimizer


def _interval(given: Any) -> Duration:
    span = Duration.parse(given)
    if span.unit in "et":
        raise ValueError(f"{given!r}: copies are made after a number of updates or a time: write 100u, 30s or 2m")
    return span


@dataclass(frozen=True, config=STRICT)
class RecoveryConfig:
    """Copies of shards, from which training continues after processes have ended (mpirun --with-ft ulfm)."""

    copies: int = Field(
        default=1, ge=0, le=1, description="number of copies of each shard, with its optimizer, in another machine's memory"
    )
    every: Annotated[Duration, BeforeValidator(_interval), PlainSerializer(str)] = Field(
        default=Duration.parse("30s"),
        description="interval between two copies of a shard, as 100u or 30s; a time is lengthened to 20 times what the last"
        " copy took; a lost shard loses about this much training",
    )


def keeper(rank: int, nodes: Sequence[int]) -> int:
    """The rank that keeps the copy of a rank's shard: one on the next machine, or the next rank on a single machine."""
    count = max(nodes) + 1
    if count == 1:
        return (rank + 1) % len(nodes)
    theirs = [other for other, node in enumerate(nodes) if node == (nodes[rank] + 1) % count]
    place = [other for other, node in enumerate(nodes) if node == nodes[rank]].index(rank)
    return theirs[place % len(theirs)]


class Replication:
    """Sends copies of this rank's shard to another rank, and keeps copies of other ranks' shards (`copies`, by rank).

    It sends a copy only after the previous one has been delivered, in chunks between the messages of training. It needs at
    least two ranks.
    """

    def __init__(self, transport: Transport, shards: Sequence[slice], config: RecoveryConfig) -> None:
        self._transport, self._shard, self._pace = transport, shards[transport.rank], Pace(config.every)
        self._keeper = keeper(transport.rank, transport.nodes)
        self.copies: dict[int, RecoveryPiece] = {}
        self._leaving: Future[None] | None = None
        transport.spawn("copies", self._keep)

    def updated(self, optimizer: Optimizer) -> None:
        """Called after each update of the shard: sends a copy if one is due."""
        delivered = self._leaving is None or self._leaving.done()
        if delivered and self._pace.due(Mark(0, optimizer.updates, 0, self._transport.now())):
            leaving = self._transport.send(self._keeper, Tag.COPY, RecoveryPiece.of(self._shard, optimizer).pack())
            self._leaving = self._transport.spawn("copy", partial(self._await, leaving, self._transport.now()))

    def _await(self, leaving: Future[None], start: float) -> None:
        leaving.result()
        self._pace.took(self._transport.now() - start)

    def _keep(self) -> None:
        while True:
            source, message = self._transport.receive(None, Tag.COPY).result()
            self.copies[source] = RecoveryPiece.unpack(message)
