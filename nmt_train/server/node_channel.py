"""At most one rank of a node exchanges at any time (thesis 3.4): the node's first rank grants the channel in turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nmt_train.common.message import Message
from nmt_train.transport import Tag, Transport


class NodeChannel:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._keeper = transport.nodes.index(transport.nodes[transport.rank])
        if self._keeper == transport.rank:
            transport.spawn("channel", self._keep)

    @contextmanager
    def granted(self) -> Iterator[None]:
        """In this context, the channel is granted to this rank."""
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
