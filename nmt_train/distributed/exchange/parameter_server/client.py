"""A worker's client of a sharded asynchronous parameter server (thesis 3.3, 3.5, 3.6; sparse: 3.8, Algorithms 8, 9).

A worker pushes a slice of its gradient to each of the shards at the same time. Each shard updates when a push arrives, and
answers with its parameters, or with the delta since its last answer to that worker.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nmt_train.distributed.codec.finite import finite
from nmt_train.distributed.context import BuildContext
from nmt_train.distributed.exchange.exchange import Exchange
from nmt_train.distributed.exchange.parameter_server.gathered_copy import GatheredCopy
from nmt_train.distributed.exchange.parameter_server.node_channel import NodeChannel
from nmt_train.distributed.exchange.parameter_server.per_node import PerNode, by_node, first_ranks
from nmt_train.distributed.exchange.parameter_server.push_codecs import PushCodecs
from nmt_train.distributed.exchange.parameter_server.replication import Replication
from nmt_train.distributed.exchange.parameter_server.requests import Pull, Push
from nmt_train.distributed.exchange.parameter_server.service import ShardService
from nmt_train.distributed.exchange.parameter_server.shard import Shard
from nmt_train.distributed.exchange.parameter_server.traffic import Traffic
from nmt_train.distributed.exchange.recovery_piece import RecoveryPiece
from nmt_train.distributed.exchange.worker_state import OPTIMIZER, Vectors
from nmt_train.distributed.message import Message
from nmt_train.distributed.plan import Plan
from nmt_train.distributed.transport import Future, Tag
from nmt_train.optim.flat_model import cpu_copy, partition
from nmt_train.optim.worker_optimizer import WorkerOptimizer

_RECEIVED, _SEEN = "server.received", "server.seen"  # names in a worker's state; see `Shard.seen`


class ParameterServer(Exchange):
    """The worker's side; `service` serves this rank's shard."""

    section = "server"
    sharded = True
    most_unacknowledged = 2

    @classmethod
    def build(cls, context: BuildContext) -> Exchange:
        server, plan = cls(context), context.plan
        if plan.server.per == "node":
            return PerNode(server, context.transport, context.flat.parameters, plan.sums, plan.local_steps)
        return NodeChannel(server, context.transport) if plan.server.one_channel_per_node else server

    def __init__(self, context: BuildContext) -> None:
        plan, transport, parameters = context.plan, context.transport, context.flat.parameters
        traffic, self._elements = Traffic.build(context), parameters.numel()
        self.shards = self.initial_slices = self.snapshot_slices = partition(
            self._elements, transport.nodes, plan.server.shards
        )
        self._shard = self.shards[transport.rank]
        super().__init__(traffic.optimizer(parameters[self._shard].clone()))
        self._transport, self._trace, self._traffic = transport, context.trace, traffic
        self._pushes = plan.server.per == "device" or transport.rank in first_ranks(
            transport.nodes
        )  # else `sync` is not called
        self.exchanges_updates, self.waits_for_others = traffic.exchanges_updates, traffic.rule.holds
        self._last_count = 0  # update count of the shard that last answered or acknowledged
        self._counts: dict[int, int] = {}  # by rank: update count of its shard at its last answer
        self._last_received: Tensor | None = None  # the parameters in these answers
        # Whether a worker continues from what it received plus all of its own updates, which deltas then leave out.
        self._adds_own_updates = plan.knows_own(traffic.feedback)
        recovers = transport.fault_tolerant and transport.size > 1 and plan.recovery.copies
        replication = Replication(transport, self.shards, plan.recovery) if recovers else None
        # Finished updates are each applied in full, unless the rule takes their mean.
        shard = Shard(
            self.optimizer, traffic.up(), traffic.down() if traffic.down else None, traffic.rule, traffic.delay,
            self._adds_own_updates, traffic.sums or traffic.exchanges_updates,
        )  # fmt: skip
        self.service = ShardService(shard, transport, context.trace, replication)
        self.staleness = self.service.staleness
        self._make_worker(parameters, plan)

    def _make_worker(self, parameters: Tensor, plan: Plan) -> None:
        """The worker's own optimizer, vectors and codecs."""
        traffic, rank = self._traffic, self._transport.rank
        self._down = traffic.down() if traffic.down else None
        own = self._pushes and traffic.exchanges_updates and traffic.prepares
        self._local = WorkerOptimizer(plan.optimizer, parameters, self.optimizer, self._trace) if own else None
        self._received = parameters.clone() if self._pushes and self._adds_own_updates else None
        self._bypass = plan.server.bypass and self.service.serves and not traffic.rule.holds
        self._holders = [rank for rank, shard in enumerate(self.shards) if shard.start < shard.stop]
        others = [other for other in self._holders if other != rank or not self._bypass]
        # Every worker starts with a different shard; otherwise all workers would push to the same one first.
        self._others = [other for other in others if other > rank] + [other for other in others if other <= rank]
        # Groups of shards that the worker exchanges with one after the other.
        self._turns = by_node(self._others, self._transport.nodes) if plan.server.one_node_at_a_time else [self._others]
        self._up = PushCodecs(self._others if self._pushes else (), self.shards, parameters, traffic.up, traffic.feedback)
        self.keeps = bool(self._others)
        self._applied: dict[int, deque[Future[Any]]] = defaultdict(deque)  # by rank, outstanding acknowledgments

    @property
    def updates(self) -> int:
        return self.optimizer.updates if self.service.serves else self._last_count

    @torch.no_grad()
    def prepare(self, gradient: Tensor, parameters: Tensor, weight: int = 1) -> None:
        if self.exchanges_updates:
            super().prepare(gradient, parameters, weight)
            if self._local is not None:
                self._local.step(gradient, parameters, self.updates)

    @torch.no_grad()
    def sync(self, gradient: Tensor, parameters: Tensor, weight: int = 1) -> None:
        weight = self._push_weight(weight)
        with self._trace.span("sync"):
            received = parameters if self._received is None else self._received
            self._prepare_push(gradient)
            for turn, ranks in enumerate(self._turns):
                for rank in ranks:
                    self._push(rank, gradient, Push.EXCHANGE, weight)
                if self._bypass and turn == 0:
                    self.service.push_directly(gradient[self._shard], weight, received[self._shard])
                self._take_answers(ranks, received)
            self._combine(received, parameters)

    def _prepare_push(self, gradient: Tensor) -> None:
        """Add what is carried over. Raises NotFinite before lossy codecs would, so that all shards get a push, or none does."""
        self._add_carried_over(self._residual_name, gradient)
        unchecked = not self._traffic.prepares  # the change of parameters by local steps; the schedule has checked a gradient
        if (self._up.lossy or unchecked) and not gradient.is_meta:
            finite(torch.linalg.vector_norm(gradient))

    def _push_weight(self, weight: int) -> int:
        """The weight of a push in a mean. For finished updates and sums of batches, it is 1 (0 without a batch)."""
        return min(weight, 1) if self.exchanges_updates or self._traffic.sums else weight

    def _combine(self, received: Tensor, parameters: Tensor) -> None:
        """With own_updates: set `parameters` to the received ones plus unsent updates."""
        if self._received is not None:
            parameters.copy_(received)
            self._up.add_residuals(parameters)

    @torch.no_grad()
    def give(self, gradient: Tensor, weight: int = 1) -> None:
        """`sync` without answers. Returns when it is sent."""
        weight = self._push_weight(weight)
        with self._trace.span("sync"):
            self._prepare_push(gradient)
            self._wait_for_applied(self.most_unacknowledged - 1)
            sent = [self._push(rank, gradient, Push.GIVE, weight) for rank in self._others]
            for rank in self._others:
                self._applied[rank].append(self._transport.receive(rank, Tag.ANSWER))
            if self._bypass:
                self.service.push_directly(gradient[self._shard], weight)
            for done in sent:
                done.result()

    @property
    def unacknowledged(self) -> int:
        return max(map(len, self._applied.values()), default=0)

    def _wait_for_applied(self, most: int) -> None:
        """Wait until at most `most` pushes per shard are unacknowledged."""
        for waiting in self._applied.values():
            while len(waiting) > most:
                with self._trace.span("waiting"):
                    self._last_count = max(self._last_count, waiting[0].result()[1].number())
                waiting.popleft()  # not before: if the wait fails, the push is unacknowledged

    @torch.no_grad()
    def fetch(self, parameters: Tensor) -> None:
        with self._trace.span("sync"):
            received = parameters if self._received is None else self._received
            for turn, ranks in enumerate(self._turns):
                for rank in ranks:
                    self._transport.send(rank, Tag.PUSH, Message((Push.FETCH,)))
                if self._bypass and turn == 0:
                    self.service.copy_to(received[self._shard])
                self._take_answers(ranks, received)
            self._wait_for_applied(0)  # a shard answers requests in their order, so these acknowledgments have arrived
            self._combine(received, parameters)

    def _take_answers(self, ranks: Sequence[int], received: Tensor) -> None:
        self._last_received = received
        answers = [(rank, self._transport.receive(rank, Tag.ANSWER)) for rank in ranks]
        for rank, answer in answers:
            with self._trace.span("waiting"):
                message, part = answer.result()[1], received[self.shards[rank]]
            with self._trace.span("decode", part.numel()):
                self._decode(message.on(part.device), part)
            self._last_count = self._counts[rank] = message.number()

    def _decode(self, message: Message, parameters: Tensor) -> None:
        """Apply a shard's answer to `parameters`, its slice of the received parameters."""
        if self._down is None:
            parameters.copy_(message.vector(parameters.numel()))
        else:
            self._down.add(message.without_numbers(1), parameters)

    def _push(self, rank: int, gradient: Tensor, kind: Push, weight: int) -> Any:
        part = gradient[self.shards[rank]]
        with self._trace.span("encode", self._up[rank].cost_elements(part.numel())):
            message = self._up[rank].encode(part, self.updates)
            if self._received is not None and self._down is not None:
                self._up[rank].add(message, self._received[self.shards[rank]])
        return self._transport.send(rank, Tag.PUSH, message.and_numbers(kind, weight))

    def leave_round(self) -> None:
        if self.waits_for_others:
            for rank in self._holders:
                self._transport.send(rank, Tag.PUSH, Message((Push.REST, 0)))
                self._applied[rank].append(self._transport.receive(rank, Tag.ANSWER))
        self._wait_for_applied(0)

    @torch.no_grad()
    def refresh(self, parameters: Tensor) -> None:
        for rank, answer in self._ask(Pull.ALL):
            message = answer.result()[1]
            place = parameters[self.shards[rank]]
            self._last_count = self._counts[rank] = message.number()
            place.copy_(message.vector(place.numel()))
        self._last_received = parameters
        if self._received is not None:
            self._received.copy_(parameters)

    @torch.no_grad()
    def settle(self, parameters: Tensor) -> None:
        """The worker keeps its received parameters, and the shards keep their record of them."""
        self.service.flush()
        for _, answer in self._ask(Pull.EXPECT):
            self._last_count = answer.result()[1].number()

    def knows(self, vectors: Mapping[str, Tensor]) -> bool:
        return self._received is None or _RECEIVED in vectors

    @torch.no_grad()
    def restore(self, parameters: Tensor) -> None:
        received = parameters if self._received is None else self._received
        for _, answer in self._ask(Pull.HAS, received):
            self._last_count = answer.result()[1].number()

    def copy(self) -> Future[Tensor]:
        wants_mean = self.optimizer.smoothed is not None
        return GatheredCopy(
            self._elements, [(self.shards[rank], answer) for rank, answer in self._ask(Pull.COPY, None, wants_mean)]
        )

    def _ask(self, kind: Pull, has: Tensor | None = None, wants_mean: bool = False) -> list[tuple[int, Future[Any]]]:
        """Send a request to all shards, independently of the pushes; returns the rank and the future answer of each shard."""
        asked = []
        for rank in self._holders:
            vectors = () if has is None else (has[self.shards[rank]].clone(),)
            self._transport.send(rank, Tag.PULL, Message((kind, int(self._pushes), int(wants_mean)), vectors))
            asked.append((rank, self._transport.receive(rank, Tag.PULLED)))
        return asked

    def snapshot(self) -> tuple[Vectors, dict[str, Any]]:
        return self.service.snapshot()

    def recovery_pieces(self, rank: int) -> list[RecoveryPiece]:
        found = self.service.recovery_pieces(self._shard)
        if self._last_received is not None:
            for holder, updates in ((other, count) for other, count in self._counts.items() if other != rank):
                told = {"parameters": cpu_copy(self._last_received[self.shards[holder]])}
                found.append(RecoveryPiece(self.shards[holder], updates, told, exact=self._down is None))
        return found

    def worker_state(self) -> Vectors:
        vectors = {name: owed.clone() for name, owed in self._carried_over.items()}
        if any(self._up.residuals()):
            vectors.setdefault(self._residual_name, torch.zeros(self._elements, device=self.optimizer.parameters.device))
            self._up.add_residuals(vectors[self._residual_name])
        if self._local is not None:
            vectors |= self._local.optimizer.packed(OPTIMIZER)
        if self._received is not None:
            vectors[_RECEIVED] = self._received
        seen = self.service.seen(self._transport.size)
        return vectors | {_SEEN: torch.tensor([self._transport.size, *seen.flatten().tolist()])}

    def rescued(self) -> Vectors:
        """`worker_state` without the record of received parameters: all survivors continue from the same parameters."""
        return {name: vector for name, vector in self.worker_state().items() if name not in (_RECEIVED, _SEEN)}

    def load_worker_state(self, vectors: Mapping[str, Tensor]) -> None:
        super().load_worker_state(vectors)
        if self._residual_name in self._carried_over:
            owed = self._carried_over[self._residual_name] = self._carried_over[self._residual_name].clone()
            self._up.take_residuals(owed)
            if not owed.any():
                del self._carried_over[self._residual_name]
        if self._local is not None:
            self._local.optimizer.unpack(OPTIMIZER, vectors, "the worker's optimizer")
        if self._received is not None and _RECEIVED in vectors:
            self._received.copy_(vectors[_RECEIVED])
        if _SEEN in vectors and vectors[_SEEN][0] == self._transport.size:  # for another number of ranks they are invalid
            self.service.load_seen(vectors[_SEEN][1:].view(self._transport.size, -1))
