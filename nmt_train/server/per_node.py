"""One exchange per node (thesis 3.7): the node's first rank combines the gradients of its ranks and shares the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from nmt_train.common.message import Message
from nmt_train.server.client import ANSWERED, Client
from nmt_train.strategy.context import BuildContext
from nmt_train.strategy.plan import ServerPlan
from nmt_train.strategy.recovery_piece import RecoveryPiece
from nmt_train.strategy.state import WorkerState
from nmt_train.transport import Tag

_REST, _GIVE, _EXPECT = range(3)  # the first number of a message
_RECEIVED = "received_by_node"  # name of the parameters that the node's first rank has sent, in another rank's state


class PerNode(Client):
    """The first rank of each node exchanges for all of the node's ranks.

    It waits for the gradients of all ranks that have not left the round; the node leaves the round when all its ranks have.
    """

    def __init__(self, context: BuildContext, settings: ServerPlan, max_in_flight: int) -> None:
        super().__init__(context, settings, max_in_flight)
        transport = context.transport
        # With local steps, each rank gives a finished update. Otherwise, the first rank prepares the joined gradient.
        self._local_steps, self.prepares_updates = settings.local_steps, False
        self._adds = context.plan.sums and not self._local_steps  # gradients, instead of averaging them
        node = transport.nodes[transport.rank]
        self._members = [rank for rank, other in enumerate(transport.nodes) if other == node]
        self._told = 0  # update count when the node's first rank last exchanged
        # The parameters that the node last received, on its first rank.
        self._of_node = context.flat.parameters.clone() if transport.rank == self._members[0] else None
        if self._of_node is not None:
            transport.spawn("node", self._gather)

    @property
    def updates(self) -> int:
        return max(super().updates, self._told)

    def prepare(self, gradient: Tensor, parameters: Tensor, weight: int) -> None:
        if self._local_steps:
            super().prepare(gradient, parameters, weight)

    def exchange(self, gradient: Tensor, parameters: Tensor, weight: int) -> None:
        """Raises NotFinite if a change of parameters by local steps is not finite; the node then waits for this rank's next."""
        if self._local_steps:
            self._up.check(gradient)
        if self._of_node is None:
            if weight:  # the node's update will contain only a share of it
                self._up.debt.include(gradient, times=len(self._members))
            self._up.settle(sent=True)
        self._transport.send(self._members[0], Tag.NODE, Message((_GIVE, weight), (gradient,)))
        message = self._transport.receive(self._members[0], Tag.GRANT).result()[1]
        self._told = message.number()
        parameters.copy_(message.vector(parameters.numel()))

    def leave_round(self) -> None:
        self._say(_REST)

    def prepare_snapshot(self) -> None:
        self._say(_EXPECT)
        super().prepare_snapshot()

    def _say(self, what: int) -> None:
        self._transport.send(self._members[0], Tag.NODE, Message((what,)))
        self._transport.receive(self._members[0], Tag.GRANT).result()

    @torch.no_grad()
    def _gather(self) -> None:
        assert self._of_node is not None
        joined = torch.zeros_like(self._of_node)
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
                super().leave_round()
        self._transport.send(source, Tag.GRANT, Message((super().updates,)))

    def _exchange_for(self, given: Mapping[int, Message], joined: Tensor) -> None:
        """Combine the gradients in the order of the ranks, not of arrival, so that sums are bit-identical in every run."""
        assert self._of_node is not None
        weights = [given[rank].number(1) for rank in sorted(given)]
        vectors = [given[rank].vector(joined.numel()).to(joined.device) for rank in sorted(given)]
        joined.copy_(vectors[0])  # a single gradient stays exact
        mean, weight = not self._adds and len(given) > 1, sum(weights)
        if mean:
            joined.mul_(weights[0])
        for vector, share in zip(vectors[1:], weights[1:], strict=True):
            joined.add_(vector, alpha=share if mean else 1)
        if mean:
            joined.div_(max(1, weight))
        if not self._local_steps:
            super().prepare(joined, self._of_node, weight)
        super().exchange(joined, self._of_node, weight)
        for rank in given:
            self._transport.send(rank, Tag.GRANT, Message((super().updates,), (self._of_node.clone(),)))

    def refresh(self, parameters: Tensor) -> None:
        self._say(_EXPECT)
        if self._of_node is None:
            super().refresh(parameters)
        else:
            super().refresh(self._of_node)
            parameters.copy_(self._of_node)

    def resume(self, parameters: Tensor) -> None:
        super().resume(parameters)
        if self._of_node is not None:
            self._of_node.copy_(parameters)

    def pieces(self) -> list[RecoveryPiece]:
        """What another rank has received from the node's first rank is newer than the answers that this rank itself got."""
        pieces = super().pieces()
        if self._of_node is not None:
            return pieces
        return [piece if piece.numbers is not None else replace(piece, exact=False) for piece in pieces]

    def contribution(self, change: Tensor) -> Tensor:
        return change / len(self._members) if self._local_steps else change

    def state(self, parameters: Tensor) -> WorkerState:
        if self._of_node is not None:
            return super().state(self._of_node)
        state = super().state(parameters)
        group = state.group | ({_RECEIVED: parameters} if self.keeps_received else {})
        return replace(state, received=None, group=group)

    def load(self, state: WorkerState) -> None:
        if self._of_node is None:
            same_ranks = ANSWERED in state.group and state.group[ANSWERED][0] == self._transport.size
            state = replace(state, received=state.group.get(_RECEIVED) if same_ranks else None)
        super().load(state)
