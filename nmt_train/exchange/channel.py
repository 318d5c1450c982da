"""At most one rank of a node exchanges at any time (thesis 3.4): the node's first rank grants the channel in turn."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from nmt_train.exchange import Exchange, Vectors
from nmt_train.message import Message
from nmt_train.wire import Tag, Wire


class OneChannel:
    """Any exchange, behind the node's channel."""

    def __init__(self, exchange: Exchange, wire: Wire) -> None:
        self._exchange, self._wire = exchange, wire
        self.optimizer, self.shard, self.staleness = exchange.optimizer, exchange.shard, exchange.staleness
        self._keeper = wire.nodes.index(wire.nodes[wire.rank])
        if self._keeper == wire.rank:
            wire.spawn("channel", self._keep)

    @property
    def updates(self) -> int:
        return self._exchange.updates

    def sync(self, gradient: Tensor, parameters: Tensor) -> None:
        self._wire.send(self._keeper, Tag.CHANNEL, Message())
        self._wire.receive(self._keeper, Tag.GRANT).result()
        self._exchange.sync(gradient, parameters)
        self._wire.send(self._keeper, Tag.CHANNEL, Message())

    def _keep(self) -> None:
        while True:
            asker, _ = self._wire.receive(None, Tag.CHANNEL).result()
            self._wire.send(asker, Tag.GRANT, Message())
            self._wire.receive(asker, Tag.CHANNEL).result()

    def rest(self) -> None:
        self._exchange.rest()

    def refresh(self, parameters: Tensor) -> None:
        self._exchange.refresh(parameters)

    def carried(self) -> Vectors:
        return self._exchange.carried()

    def carry(self, vectors: Mapping[str, Tensor]) -> None:
        self._exchange.carry(vectors)
