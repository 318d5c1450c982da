"""One exchange per node (thesis 3.7): the devices of a node add up first, and all consume what comes back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nmt_train.exchange import Around, Exchange
from nmt_train.message import Message
from nmt_train.wire import Tag, Wire

_REST = Message((0,))


def first_ranks(nodes: Sequence[int]) -> list[int]:
    """Of every node the rank that exchanges for it; nodes: the node of each rank."""
    return [rank for rank, node in enumerate(nodes) if nodes.index(node) == rank]


class PerNode(Around):
    """Any exchange, used by the first rank of each node for all of the node's ranks.

    It waits for the gradients of all that have not said that they rest.
    """

    def __init__(self, exchange: Exchange, wire: Wire, parameters: Tensor) -> None:
        super().__init__(exchange)
        self._wire, self.at_worker = wire, False
        node = wire.nodes[wire.rank]
        self._members = [rank for rank, its in enumerate(wire.nodes) if its == node]
        self._told = 0  # updates when the node's first rank last exchanged
        self._received = parameters.clone() if wire.rank == self._members[0] else None
        self.in_rounds = True
        if self._received is not None:
            wire.spawn("node", self._gather)

    @property
    def updates(self) -> int:
        return max(self._exchange.updates, self._told)

    def prepare(self, gradient: Tensor, parameters: Tensor) -> None:
        """The sum will be prepared."""

    def sync(self, gradient: Tensor, parameters: Tensor) -> None:
        self._wire.send(self._members[0], Tag.NODE, Message((1,), (gradient,)))
        message = self._wire.receive(self._members[0], Tag.GRANT).result()[1]
        self._told = message.number()
        parameters.copy_(message.vector(parameters.numel()))

    @torch.no_grad()
    def _gather(self) -> None:
        assert self._received is not None
        total = torch.zeros_like(self._received)
        resting: set[int] = set()
        given: list[int] = []
        while True:
            source, message = self._wire.receive(None, Tag.NODE).result()
            if message.numbers == _REST.numbers:
                resting.add(source)
            else:
                resting.discard(source)
                given.append(source)
                total.add_(message.vector(total.numel()).to(total.device))
            if not given or len(resting.union(given)) < len(self._members):
                continue
            self._exchange.prepare(total, self._received)
            self._exchange.sync(total, self._received)
            for rank in given:
                self._wire.send(rank, Tag.GRANT, Message((self._exchange.updates,), (self._received.clone(),)))
            total.zero_()
            given.clear()

    def rest(self) -> None:
        self._wire.send(self._members[0], Tag.NODE, _REST)
        super().rest()

    def refresh(self, parameters: Tensor) -> None:
        super().refresh(parameters)
        if self._received is not None:
            self._received.copy_(parameters)
