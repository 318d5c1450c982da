"""One exchange per node (thesis 3.7): the node's first rank combines the gradients of its ranks and shares the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nmt_train.distributed.codec.finite import finite
from nmt_train.distributed.exchange.exchange import Exchange, ExchangeWrapper
from nmt_train.distributed.exchange.recovery_piece import RecoveryPiece
from nmt_train.distributed.exchange.worker_state import UNSENT, Vectors
from nmt_train.distributed.message import Message
from nmt_train.distributed.transport import Tag, Transport

_REST, _GIVE, _EXPECT = range(3)  # the first number of a message
_RECEIVED = "node.received"  # name of the node's last received parameters in the state of its first rank


def first_ranks(nodes: Sequence[int]) -> list[int]:
    """The first rank of every node, which exchanges for the node; nodes: the node of each rank."""
    return [rank for rank, node in enumerate(nodes) if nodes.index(node) == rank]


def by_node(ranks: Sequence[int], nodes: Sequence[int]) -> list[list[int]]:
    """Group ranks by their nodes, in the order of each node's first rank in `ranks`; at least one group, which may be empty."""
    groups: dict[int, list[int]] = {}
    for rank in ranks:
        groups.setdefault(nodes[rank], []).append(rank)
    return list(groups.values()) or [[]]


class PerNode(ExchangeWrapper):
    """Any exchange, used by the first rank of each node for all of the node's ranks.

    It waits for the gradients of all ranks that have not left the round; the node leaves the round when all its ranks have.
    sums: gradients are summed, not averaged (see optim/gradient_accumulation.py). updates: each rank makes local steps, and
    what it gives is a finished update.
    """

    def __init__(
        self, exchange: Exchange, transport: Transport, parameters: Tensor, sums: bool = False, updates: bool = False
    ) -> None:
        super().__init__(exchange)
        self._transport, self.exchanges_updates = transport, False
        self._sums, self._given_updates = sums and not updates, updates
        node = transport.nodes[transport.rank]
        self._members = [rank for rank, other in enumerate(transport.nodes) if other == node]
        self._told = 0  # update count when the node's first rank last exchanged
        self._received = parameters.clone() if transport.rank == self._members[0] else None
        self.waits_for_others = True
        if self._received is not None:
            transport.spawn("node", self._gather)

    @property
    def updates(self) -> int:
        return max(self._exchange.updates, self._told)

    def prepare(self, gradient: Tensor, parameters: Tensor, weight: int = 1) -> None:
        """Only for a local step: otherwise, the first rank of the node prepares the joined gradient."""
        if self._given_updates:
            self._exchange.prepare(gradient, parameters, weight)

    def sync(self, gradient: Tensor, parameters: Tensor, weight: int = 1) -> None:
        """Raises NotFinite if a change of parameters by local steps is not finite; the node then waits for this rank's next."""
        if self._given_updates and not gradient.is_meta:
            finite(torch.linalg.vector_norm(gradient))
        if weight and UNSENT in self._carried_over:  # the node's update will contain only a share of it
            gradient.add_(self._carried_over.pop(UNSENT), alpha=len(self._members))
        self._transport.send(self._members[0], Tag.NODE, Message((_GIVE, weight), (gradient,)))
        message = self._transport.receive(self._members[0], Tag.GRANT).result()[1]
        self._told = message.number()
        parameters.copy_(message.vector(parameters.numel()))

    def leave_round(self) -> None:
        self._say(_REST)

    def settle(self, parameters: Tensor) -> None:
        self._say(_EXPECT)
        super().settle(parameters)

    def _say(self, what: int) -> None:
        self._transport.send(self._members[0], Tag.NODE, Message((what,)))
        self._transport.receive(self._members[0], Tag.GRANT).result()

    @torch.no_grad()
    def _gather(self) -> None:
        assert self._received is not None
        joined = torch.zeros_like(self._received)
        resting: set[int] = set()
        given: dict[int, Message] = {}  # by rank
        while True:
            source, message = self._transport.receive(None, Tag.NODE).result()
            resting.discard(source)
            if message.number() == _GIVE:
                given[source] = message
            else:
                self._note(source, message.number(), resting)
            if given and len(resting) + len(given) == len(self._members):
                self._exchange_for(given, joined)
                given.clear()

    def _note(self, source: int, what: int, resting: set[int]) -> None:
        """Record that a rank has left the round or takes part again."""
        if what == _REST:
            resting.add(source)
            if len(resting) == len(self._members):
                self._exchange.leave_round()
        self._transport.send(source, Tag.GRANT, Message((self._exchange.updates,)))

    def _exchange_for(self, given: Mapping[int, Message], joined: Tensor) -> None:
        """Combine the gradients in the order of the ranks, not of arrival, so that sums are bit-identical in every run."""
        assert self._received is not None
        weights = [given[rank].number(1) for rank in sorted(given)]
        vectors = [given[rank].vector(joined.numel()).to(joined.device) for rank in sorted(given)]
        joined.copy_(vectors[0])  # a single gradient stays exact
        mean, weight = not self._sums and len(given) > 1, sum(weights)
        if mean:
            joined.mul_(weights[0])
        for vector, share in zip(vectors[1:], weights[1:], strict=True):
            joined.add_(vector, alpha=share if mean else 1)
        if mean:
            joined.div_(max(1, weight))
        if not self._given_updates:
            self._exchange.prepare(joined, self._received, weight)
        self._exchange.sync(joined, self._received, weight)
        for rank in given:
            self._transport.send(rank, Tag.GRANT, Message((self._exchange.updates,), (self._received.clone(),)))

    def refresh(self, parameters: Tensor) -> None:
        self._say(_EXPECT)
        if self._received is None:
            super().refresh(parameters)
        else:
            super().refresh(self._received)
            parameters.copy_(self._received)

    def knows(self, vectors: Mapping[str, Tensor]) -> bool:
        return super().knows(vectors) and (self._received is None or _RECEIVED in vectors)

    def restore(self, parameters: Tensor) -> None:
        super().restore(parameters if self._received is None else self._received)

    def recovery_pieces(self, rank: int) -> list[RecoveryPiece]:
        """What another rank has received from the node's first rank is newer than the answers that this rank itself got."""
        pieces = super().recovery_pieces(rank)
        if self._received is not None:
            return pieces
        return [piece if piece.numbers is not None else replace(piece, exact=False) for piece in pieces]

    def contribution(self, vector: Tensor) -> Tensor:
        whole = super().contribution(vector)
        return whole / len(self._members) if self._given_updates else whole

    def worker_state(self) -> Vectors:
        received = {} if self._received is None else {_RECEIVED: self._received}
        return super().worker_state() | received | self._carried_over

    def rescued(self) -> Vectors:
        return self._exchange.rescued() | self._carried_over

    def load_worker_state(self, vectors: Mapping[str, Tensor]) -> None:
        if self._received is None and self._given_updates and UNSENT in vectors:  # only the node's first rank uses the exchange
            self._carried_over = {UNSENT: vectors[UNSENT].to(self.optimizer.parameters)}
            vectors = {name: vector for name, vector in vectors.items() if name != UNSENT}
        super().load_worker_state(vectors)
        if self._received is not None and _RECEIVED in vectors:
            self._received.copy_(vectors[_RECEIVED])
