"""Copies of shards in the memory of other machines, so that a shard survives the end of its process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from nmt_train.common.duration import Mark, Pace
from nmt_train.optim.optimizer import Optimizer
from nmt_train.strategy.config import RecoveryConfig
from nmt_train.strategy.recovery_piece import RecoveryPiece
from nmt_train.transport import Future, Tag, Transport


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
