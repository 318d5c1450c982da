"""Copies of shards in the memory of other machines, so that what a process held outlives it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer
from pydantic.dataclasses import dataclass

from nmt_train.duration import Span
from nmt_train.exchange import Piece
from nmt_train.optim import Optimizer
from nmt_train.section import STRICT
from nmt_train.wire import Future, Tag, Wire


def _interval(given: Any) -> Span:
    span = Span.parse(given)
    if span.unit in "et":
        raise ValueError(f"{given!r}: copies are made every so many updates, or in time: write 100u, 30s or 2m")
    return span


@dataclass(frozen=True, config=STRICT)
class RecoveryConfig:
    """What outlives processes that end, where training goes on without them (mpirun --with-ft ulfm)."""

    copies: int = Field(default=1, ge=0, le=1, description="of each shard, with its optimiser, in another machine's memory")
    every: Annotated[Span, BeforeValidator(_interval), PlainSerializer(str)] = Field(
        default=Span.parse("30s"), description="from one copy of a shard to the next, as 100u or 30s: what may be lost of it"
    )


class Interval:
    """Says when it is over, each time from when it last was."""

    def __init__(self, span: Span) -> None:
        self._span, self._last = span, -math.inf

    def over(self, updates: int, now: float) -> bool:
        """Whether it is, after so many updates, and seconds on a clock; the first time at once."""
        here = updates if self._span.unit == "u" else now
        if here - self._last < self._span.amount:
            return False
        self._last = here
        return True


def keeper(rank: int, nodes: Sequence[int]) -> int:
    """Which rank keeps the copy of a rank's shard: one of the next machine, or, if there is one machine, the next rank."""
    count = max(nodes) + 1
    if count == 1:
        return (rank + 1) % len(nodes)
    theirs = [other for other, node in enumerate(nodes) if node == (nodes[rank] + 1) % count]
    place = [other for other, node in enumerate(nodes) if node == nodes[rank]].index(rank)
    return theirs[place % len(theirs)]


class Copies:
    """Sends copies of this rank's shard, and keeps those of other ranks' (`kept`, by rank).

    A copy leaves only when the one before has arrived, piece by piece between training's own messages.
    """

    def __init__(self, wire: Wire, shards: Sequence[slice], config: RecoveryConfig) -> None:
        self._wire, self._shard, self._interval = wire, shards[wire.rank], Interval(config.every)
        self._keeper = keeper(wire.rank, wire.nodes)
        self.kept: dict[int, Piece] = {}
        self._leaving: Future[None] | None = None
        holders = [rank for rank, its in enumerate(shards) if its.start < its.stop]
        if any(rank != wire.rank and keeper(rank, wire.nodes) == wire.rank for rank in holders):
            wire.spawn("copies", self._keep)

    def updated(self, optimizer: Optimizer) -> None:
        """After an update of the shard: copy it if it is time to."""
        arrived = self._leaving is None or self._leaving.done()
        if arrived and self._keeper != self._wire.rank and self._interval.over(optimizer.updates, self._wire.now()):
            self._leaving = self._wire.send(self._keeper, Tag.COPY, Piece.of(self._shard, optimizer).pack())

    def _keep(self) -> None:
        while True:
            source, message = self._wire.receive(None, Tag.COPY).result()
            self.kept[source] = Piece.unpack(message)
