"""At most one rank of a node exchanges at any time (thesis 3.4): the node's first rank grants the channel in turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from nmt_train.distributed.exchange.exchange import Exchange, ExchangeWrapper
from nmt_train.distributed.message import Message
from nmt_train.distributed.transport import Tag, Transport


class NodeChannel(ExchangeWrapper):
    """Wraps any exchange; a rank uses it only while the node's channel is granted to this rank."""

    def __init__(self, exchange: Exchange, transport: Transport) -> None:
        super().__init__(exchange)
        self._transport = transport
        self._keeper = transport.nodes.index(transport.nodes[transport.rank])
        if self._keeper == transport.rank:
            transport.spawn("channel", self._keep)

    def sync(self, gradient: Tensor, parameters: Tensor, weight: int = 1) -> None:
        with self._granted():
            self._exchange.sync(gradient, parameters, weight)

    def give(self, gradient: Tensor, weight: int = 1) -> None:
        with self._granted():
            self._exchange.give(gradient, weight)

    def fetch(self, parameters: Tensor) -> None:
        with self._granted():
            self._exchange.fetch(parameters)

    @contextmanager
    def _granted(self) -> Iterator[None]:
        self._transport.send(self._keeper, Tag.CHANNEL, Message())
        self._transport.receive(self._keeper, Tag.GRANT).result()
        try:
            yield
        finally:
            self._transport.send(self._keeper, Tag.CHANNEL, Message())

    def _keep(self) -> None:
        while True:
            asker, _ = self._transport.receive(None, Tag.CHANNEL).result()
            self._transport.send(asker, Tag.GRANT, Message())
            self._transport.receive(asker, Tag.CHANNEL).result()
