"""A worker's client of a sharded asynchronous parameter server (thesis 3.3, 3.5, 3.6; sparse: 3.8, Algorithms 8, 9).

A worker pushes a slice of its gradient to each of the shards at the same time. Each shard updates when a push arrives, and
answers with its parameters, or with the delta since its last answer to that worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nmt_train.codec.codec import Codec
from nmt_train.codec.dense import Dense
from nmt_train.common.message import Message
from nmt_train.optim.flat_model import cpu_copy, partition
from nmt_train.optim.worker_optimizer import WorkerOptimizer
from nmt_train.server.acknowledgments import Acknowledgments
from nmt_train.server.node_channel import NodeChannel
from nmt_train.server.nodes import by_node, dense_ranks, first_ranks
from nmt_train.server.own_shard import down_codec, serve, up_codec
from nmt_train.server.pulls import Pulls
from nmt_train.server.push_codecs import PushCodecs
from nmt_train.server.requests import Pull, Push
from nmt_train.strategy.context import BuildContext
from nmt_train.strategy.plan import ServerPlan
from nmt_train.strategy.recovery_piece import RecoveryPiece
from nmt_train.strategy.state import WorkerState
from nmt_train.strategy.strategy import MOST_UNACKNOWLEDGED
from nmt_train.strategy.update_rules import RULES
from nmt_train.transport import Future, Tag

ANSWERED = "answered"  # name of the update counts of the shard's last answers in a worker's state; see `Shard.seen`


class Client:
    """The worker's side; `service` serves this rank's shard, and `optimizer` is the shard's.

    A worker pushes a payload: a gradient, or an update by its own optimizer, if it `prepares_updates`, or by local steps.
    keeps_received: the parameters that a worker has received may differ from the global ones, so a snapshot must contain them.

    If the plan `keeps_own` updates, the worker continues from what it has received plus all updates that it has not sent yet
    (the residuals). Shards know only the former, `_known_to_shards`, to which their deltas apply.
    """

    def __init__(self, context: BuildContext, settings: ServerPlan, max_in_flight: int) -> None:
        plan, transport, parameters = context.plan, context.transport, context.flat.parameters
        self._settings, self._transport, self._trace, self._sums = settings, transport, context.trace, plan.sums
        whole = context.flat.matrices() if plan.optimizer.name == "muon" and not settings.sends_updates else ()
        self.shards = partition(parameters.numel(), transport.nodes, settings.shards, whole)
        self._shard = self.shards[transport.rank]
        self.service = serve(context, settings, self.shards, max_in_flight)
        self.optimizer = self.service.optimizer
        self._last_count = 0  # update count of the shard that last answered or acknowledged
        self._counts: dict[int, int] = {}  # by rank: update count of its shard at its last answer
        self._last_answers: Tensor | None = None  # the parameters in these answers
        self._unacknowledged = Acknowledgments(transport, context.trace)
        self._pushes = settings.per == "device" or transport.rank in first_ranks(transport.nodes)  # else, it only pulls
        self._pulls = Pulls(transport, self.shards, self._pushes)
        self._rounds = RULES[settings.rule].holds
        self._make_worker(context)

    def _make_worker(self, context: BuildContext) -> None:
        """The worker's own optimizer, vectors and codecs."""
        settings, rank, parameters = self._settings, self._transport.rank, context.flat.parameters
        self._near = dense_ranks(rank, self._transport.nodes, settings.bypass)
        self._down = down_codec(context, settings)
        self.prepares_updates = self._pushes and settings.sends_updates and not settings.local_steps
        self._worker_optimizer = None
        if self.prepares_updates:
            self._worker_optimizer = WorkerOptimizer(context.plan.optimizer, context.flat, self.optimizer, self._trace)
        self._known_to_shards = parameters.clone() if self._pushes and settings.keeps_own else None
        self._bypass = settings.bypass != "none" and self.service.serves and not self._rounds
        self._holders = [rank for rank, shard in enumerate(self.shards) if shard.start < shard.stop]
        others = [other for other in self._holders if other != rank or not self._bypass]
        # Shards that are reached by messages. Every worker starts with another one, so that not all push to the same one first.
        self._others = [other for other in others if other > rank] + [other for other in others if other <= rank]
        # Groups of shards that the worker exchanges with one after the other.
        self._turns = by_node(self._others, self._transport.nodes) if settings.one_node_at_a_time else [self._others]
        self._up = PushCodecs(
            self._others if self._pushes else (), self.shards, parameters, settings.sends_updates,
            lambda rank: Dense() if rank in self._near else up_codec(context, settings),
        )  # fmt: skip
        self.keeps_received = bool(self._others)
        self._loaded: Tensor | None = None  # the received parameters of a loaded state
        self._channel = NodeChannel(self._transport) if settings.one_channel_per_node and settings.per == "device" else None

    @property
    def updates(self) -> int:
        """The number of updates of the global parameters that this rank knows of."""
        return self.optimizer.updates if self.service.serves else self._last_count

    @torch.no_grad()
    def prepare(self, gradient: Tensor, parameters: Tensor, weight: int) -> None:
        """Turn the gradient, in place, into what is pushed; does not change `parameters`, the worker's own.

        weight: of the gradient in a mean (see gradient_accumulation.py); 0 if the worker had no batch, so that it is zero.
        """
        if weight:
            self._up.gradient_debt.include(gradient)
        if self._worker_optimizer is not None:
            self._worker_optimizer.step(gradient, parameters, self.updates)

    @torch.no_grad()
    def exchange(self, payload: Tensor, parameters: Tensor, weight: int) -> None:
        """Push the payload, which may be overwritten, and pull: update `parameters`, which an earlier exchange has set."""
        with self._granted(), self._trace.span("sync"):
            weight, received = self._push_weight(weight), parameters if self._known_to_shards is None else self._known_to_shards
            self._prepare_push(payload)
            for turn, ranks in enumerate(self._turns):
                for rank in ranks:
                    self._send(rank, payload, Push.EXCHANGE, weight)
                if self._bypass and turn == 0:
                    self.service.push_directly(payload[self._shard], weight, received[self._shard])
                self._take_answers(ranks, received)
            self._combine(received, parameters)

    def _granted(self) -> AbstractContextManager[None]:
        """The channel of the node, if its ranks share one."""
        return nullcontext() if self._channel is None else self._channel.granted()

    def _prepare_push(self, payload: Tensor) -> None:
        """Add what is owed. Raises NotFinite before lossy codecs would, so that all shards get a push, or none does."""
        self._up.debt.include(payload)
        if self._up.lossy or self._settings.local_steps:  # else, the strategy has checked it
            self._up.check(payload)
        self._up.settle(sent=True)

    def _push_weight(self, weight: int) -> int:
        """The weight of a push in a mean. For finished updates and sums of batches, it is 1 (0 without a batch)."""
        return min(weight, 1) if self._settings.sends_updates or self._sums else weight

    def _combine(self, received: Tensor, parameters: Tensor) -> None:
        """If the worker keeps its own updates: set `parameters` to the received ones plus those that are not sent yet."""
        if self._known_to_shards is not None:
            parameters.copy_(received)
            self._up.add_residuals(parameters)

    @torch.no_grad()
    def push(self, payload: Tensor, weight: int) -> None:
        """Push the payload, without receiving anything. Returns when it is sent."""
        with self._granted(), self._trace.span("sync"):
            weight = self._push_weight(weight)
            self._prepare_push(payload)
            self._last_count = max(self._last_count, self._unacknowledged.wait(MOST_UNACKNOWLEDGED - 1))
            sent = [self._send(rank, payload, Push.GIVE, weight) for rank in self._others]
            self._unacknowledged.expect(self._others)
            if self._bypass:
                self.service.push_directly(payload[self._shard], weight)
            for done in sent:
                done.result()

    @property
    def unacknowledged(self) -> int:
        """How many of the last calls of `push` may not have been applied yet."""
        return self._unacknowledged.most

    @torch.no_grad()
    def pull(self, parameters: Tensor) -> None:
        """Update `parameters`, which this worker last received, without pushing anything."""
        with self._granted(), self._trace.span("sync"):
            received = parameters if self._known_to_shards is None else self._known_to_shards
            for turn, ranks in enumerate(self._turns):
                for rank in ranks:
                    self._transport.send(rank, Tag.PUSH, Message((Push.FETCH,)))
                if self._bypass and turn == 0:
                    self.service.copy_to(received[self._shard])
                self._take_answers(ranks, received)
            # A shard answers requests in their order, so these acknowledgments have arrived.
            self._last_count = max(self._last_count, self._unacknowledged.wait(0))
            self._combine(received, parameters)

    def _take_answers(self, ranks: Sequence[int], received: Tensor) -> None:
        self._last_answers = received
        answers = [(rank, self._transport.receive(rank, Tag.ANSWER)) for rank in ranks]
        for rank, answer in answers:
            with self._trace.span("waiting"):
                message, part = answer.result()[1], received[self.shards[rank]]
            with self._trace.span("decode", part.numel()):
                self._decode(rank, message.on(part.device), part)
            self._last_count = self._counts[rank] = message.number()

    def _delta_codec(self, rank: int) -> Codec | None:
        """The codec of the deltas that a rank's shard answers with; None: it answers with its parameters."""
        return None if rank in self._near else self._down

    def _decode(self, rank: int, message: Message, parameters: Tensor) -> None:
        """Apply a shard's answer to `parameters`, its slice of the received parameters."""
        if (codec := self._delta_codec(rank)) is None:
            parameters.copy_(message.vector(parameters.numel()))
        else:
            codec.add(message.without_numbers(1), parameters)

    def _send(self, rank: int, payload: Tensor, kind: Push, weight: int) -> Any:
        part = payload[self.shards[rank]]
        with self._trace.span("encode", self._up[rank].cost_elements(part.numel())):
            message = self._up[rank].encode(part, self.updates)
            if self._known_to_shards is not None and self._delta_codec(rank) is not None:  # the shard's deltas leave it out
                self._up[rank].add(message, self._known_to_shards[self.shards[rank]])
        return self._transport.send(rank, Tag.PUSH, message.and_numbers(kind, weight))

    def leave_round(self) -> None:
        """Announce that this worker pushes nothing until its next `exchange`, so that no other worker waits for it.

        Returns when its shards have accepted everything that this worker has pushed.
        """
        if self._rounds:
            for rank in self._holders:
                self._transport.send(rank, Tag.PUSH, Message((Push.REST, 0)))
            self._unacknowledged.expect(self._holders)
        self._last_count = max(self._last_count, self._unacknowledged.wait(0))

    @torch.no_grad()
    def refresh(self, parameters: Tensor) -> None:
        """Set `parameters` to exactly the global ones. Called while no worker has anything in flight."""
        for rank, answer in self._pulls.ask(Pull.ALL):
            message = answer.result()[1]
            place = parameters[self.shards[rank]]
            self._last_count = self._counts[rank] = message.number()
            place.copy_(message.vector(place.numel()))
        self._last_answers, self._loaded = parameters, None
        if self._known_to_shards is not None:
            self._known_to_shards.copy_(parameters)

    @torch.no_grad()
    def prepare_snapshot(self) -> None:
        """Apply incomplete bundles of pushes, and make rounds wait for this worker again.

        Called while no worker has anything in flight. The worker keeps its received parameters, and the shards keep their
        record of them.
        """
        self.service.flush()
        for _, answer in self._pulls.ask(Pull.EXPECT):
            self._last_count = answer.result()[1].number()

    @property
    def restores(self) -> bool:
        """Whether the loaded state has the parameters that this worker had received."""
        return self._loaded is not None

    @torch.no_grad()
    def resume(self, parameters: Tensor) -> None:
        """If it `restores`: continue with these parameters instead of calling `refresh`."""
        assert self._loaded is not None
        received = parameters if self._known_to_shards is None else self._known_to_shards
        received.copy_(self._loaded)
        self._loaded = None
        for _, answer in self._pulls.ask(Pull.HAS, received):
            self._last_count = answer.result()[1].number()
        self._combine(received, parameters)

    def copy(self) -> Future[Tensor]:
        return self._pulls.copy(wants_mean=self.optimizer.smoothed is not None)

    def piece(self) -> RecoveryPiece:
        """A copy of this rank's shard, with its optimizer."""
        return self.service.pieces(self._shard)[0]

    def pieces(self) -> list[RecoveryPiece]:
        """`piece`, the copies of other ranks' shards, and the parameters that this rank has received."""
        found = self.service.pieces(self._shard, replicas=True)
        if self._last_answers is not None:
            for holder, updates in ((other, count) for other, count in self._counts.items() if other != self._transport.rank):
                told = {"parameters": cpu_copy(self._last_answers[self.shards[holder]])}
                found.append(RecoveryPiece(self.shards[holder], updates, told, exact=self._delta_codec(holder) is None))
        return found

    def state(self, parameters: Tensor) -> WorkerState:
        """See `Strategy.state`. parameters: what this worker last received, perhaps with its own updates."""
        received = parameters if self._known_to_shards is None else self._known_to_shards
        answered = self.service.seen(self._transport.size)
        return replace(
            self._up.state(),
            received=received if self.keeps_received else None,
            optimizer={} if self._worker_optimizer is None else self._worker_optimizer.optimizer.packed(),
            group={ANSWERED: torch.tensor([self._transport.size, *answered.flatten().tolist()])},
        )  # fmt: skip

    def load(self, state: WorkerState) -> None:
        """Continue from what `state` returned; `resume` continues with the received parameters."""
        like = self.optimizer.parameters
        self._up.load(state)
        if self._worker_optimizer is not None:
            self._worker_optimizer.optimizer.unpack(state.optimizer, "the worker's optimizer")
        self._loaded = state.received.to(like) if self.keeps_received and state.received is not None else None
        answered = state.group.get(ANSWERED)
        if answered is not None and answered[0] == self._transport.size:  # for another number of ranks it is invalid
            self.service.load_seen(answered[1:].view(self._transport.size, -1))

    def contribution(self, change: Tensor) -> Tensor:
        """What an unsent change of this worker's parameters will add to the global ones; this is saved."""
        return change
