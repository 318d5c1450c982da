"""An asynchronous parameter server in shards, one on every rank or fewer (thesis 3.3, 3.5, 3.6; sparse: 3.8, Algorithms 8, 9).

A worker pushes a slice of its gradient to every shard at once; each shard updates with what it gets, when it gets it, and
answers with its parameters, or with what changed since the worker's last answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nmt_train.adder import Adder
from nmt_train.codec import Codec
from nmt_train.codec.feedback import Feedback
from nmt_train.exchange import OPTIMIZER, RESIDUAL, UNSENT, Exchange, ExchangeConfig, Piece, Vectors
from nmt_train.exchange.copies import Copies
from nmt_train.exchange.own import OwnOptimizer
from nmt_train.exchange.rules import Rule
from nmt_train.exchange.shard import Shard
from nmt_train.flat import cut, kept
from nmt_train.message import Message
from nmt_train.optim import Optimizer, OptimizerConfig
from nmt_train.trace import Trace
from nmt_train.wire import Tag, Wire

# What a worker wants of a shard, the first number of its messages: update and answer, one of them, or not to be waited for.
_EXCHANGE, _GIVE, _FETCH, _REST = range(4)


class Server(Exchange):
    """The worker's end and this rank's shard. `up` makes the codec of pushes, `down` that of deltas (None: parameters).

    delay: how many exchanges a gradient is behind the parameters that came last: 1 where exchanges overlap with computing.
    at_worker: workers push finished updates, and shards add them up; prepares: `prepare` makes them of gradients, not the
    schedule. pushes: whether `sync` will be called on this rank. copies: of shards, where they must outlive their ranks.
    """

    def __init__(
        self,
        wire: Wire,
        parameters: Tensor,
        optimizer: OptimizerConfig,
        config: ExchangeConfig,
        up: Callable[[], Codec],
        down: Callable[[], Codec] | None,
        feedback: bool,
        rule: Rule,
        trace: Trace,
        delay: int = 0,
        at_worker: bool = False,
        prepares: bool = True,
        pushes: bool = True,
        copies: Callable[[list[slice]], Copies] | None = None,
    ) -> None:
        self._elements = parameters.numel()
        self.shards = self.given = self.kept = cut(self._elements, wire.nodes, config.shards)
        shard = parameters[self.shards[wire.rank]].clone()
        super().__init__((Adder if at_worker else Optimizer)(optimizer, shard))
        self._wire, self._trace, self.at_worker, self._pushes, self._prepares = wire, trace, at_worker, pushes, prepares
        self._shard = self.shards[wire.rank]
        self._holders = [rank for rank, shard in enumerate(self.shards) if shard.start < shard.stop]
        self._serves = self._shard.start < self._shard.stop
        self.in_rounds = rule.holds
        self._rule, self._bypass = rule, config.bypass and self._serves and not rule.holds
        self._told = 0  # updates of a shard when it last answered
        self._heard: dict[int, int] = {}  # the same of each rank's shard
        self._latest: Tensor | None = None  # the parameters as these have answered
        self._copies = copies(self.shards) if copies else None
        self._whole = config.knows_own(at_worker, feedback)
        self._own = Shard(self.optimizer, up(), down() if down else None, rule, delay, knows_own=self._whole)
        self.staleness = self._own.staleness
        self._lock = wire.lock()
        self._owes = UNSENT if at_worker else RESIDUAL
        own = pushes and ((at_worker and prepares) or config.local_gradient)
        self._local = OwnOptimizer(optimizer, parameters) if own else None
        self._newest: Tensor | None = None  # with local_gradient: the update by the last gradient
        self._received = parameters.clone() if pushes and (config.local_gradient or self._whole) else None
        self._others = [rank for rank in self._holders if rank != wire.rank or not self._bypass]
        # Everybody begins with another shard: else all would queue at the first.
        self._others = [rank for rank in self._others if rank > wire.rank] + [
            rank for rank in self._others if rank <= wire.rank
        ]
        self._up: dict[int, Codec] = {
            rank: Feedback(up(), torch.zeros_like(parameters[self.shards[rank]])) if feedback else up()
            for rank in self._others
            if pushes
        }
        if self._serves:
            wire.spawn("server", self._serve)
            wire.spawn("pulls", self._show)

    @property
    def updates(self) -> int:
        return self.optimizer.updates if self._serves else self._told

    @torch.no_grad()
    def prepare(self, gradient: Tensor, parameters: Tensor) -> None:
        if self.at_worker:
            self._pay(RESIDUAL, gradient)
            self._step(gradient, parameters)

    @torch.no_grad()
    def sync(self, gradient: Tensor, parameters: Tensor) -> None:
        with self._trace.span("sync"):
            received = parameters if self._received is None else self._received
            if self._local is not None and not self.at_worker:
                self._newest = gradient.clone()
                self._step(self._newest, received)
            self._pay(self._owes, gradient)
            for rank in self._others:
                self._push(rank, gradient, received, _EXCHANGE)
            if self._bypass:
                self._push_directly(gradient[self._shard], received[self._shard])
            self._take_answers(received)
            if self._received is not None:
                self._go_on_from(received, parameters)

    def _step(self, gradient: Tensor, start: Tensor) -> None:
        """Turn a gradient into the update that the worker's own optimiser makes of it."""
        if self._local is not None:
            with self._trace.span("update", gradient.numel()):
                self._local.optimizer.follow(self.optimizer, self.updates)
                self._local.step(gradient, start)

    def _go_on_from(self, received: Tensor, parameters: Tensor) -> None:
        """What was received, and what the worker knows besides: all of its own updates, or that of its last gradient."""
        parameters.copy_(received)
        if self._whole:
            for rank, codec in self._up.items():
                if isinstance(codec, Feedback):
                    parameters[self.shards[rank]].add_(codec.residual)
        elif self._newest is not None:
            parameters.add_(self._newest)

    @torch.no_grad()
    def give(self, gradient: Tensor) -> None:
        """`sync` without what comes back; until the gradient has left."""
        with self._trace.span("sync"):
            self._pay(self._owes, gradient)
            received = gradient if self._received is None else self._received
            sent = [self._push(rank, gradient, received, _GIVE) for rank in self._others]
            if self._bypass:
                with self._lock, self._trace.span("update", self.optimizer.effort):
                    self._own.push_directly(self._wire.rank, gradient[self._shard])
                    self._updated()
            for done in sent:
                done.result()

    @torch.no_grad()
    def fetch(self, parameters: Tensor) -> None:
        """`sync` without what is given away."""
        with self._trace.span("sync"):
            received = parameters if self._received is None else self._received
            for rank in self._others:
                self._wire.send(rank, Tag.PUSH, Message((_FETCH,)))
            if self._bypass:
                with self._lock:
                    self._own.copy_to(self._wire.rank, received[self._shard])
            self._take_answers(received)
            if self._received is not None:
                self._go_on_from(received, parameters)

    def _take_answers(self, received: Tensor) -> None:
        self._latest = received
        answers = [(rank, self._wire.receive(rank, Tag.ANSWER)) for rank in self._others]
        for rank, answer in answers:
            with self._trace.span("waiting"):
                message = answer.result()[1]
            with self._trace.span("decode", received[self.shards[rank]].numel()):
                self._hear(rank, self._own.bring(message.on(received.device), received[self.shards[rank]]))

    def _hear(self, rank: int, updates: int) -> None:
        self._told = self._heard[rank] = updates

    def _push(self, rank: int, gradient: Tensor, received: Tensor, kind: int) -> Any:
        part = gradient[self.shards[rank]]
        with self._trace.span("encode", self._up[rank].effort(part.numel())):
            message = self._up[rank].encode(part, self.updates)
            if self._own.knows_own:
                self._up[rank].add(message, received[self.shards[rank]])
        return self._wire.send(rank, Tag.PUSH, message.and_numbers(kind))

    def _push_directly(self, gradient: Tensor, parameters: Tensor) -> None:
        with self._lock, self._trace.span("update", self.optimizer.effort):
            self._own.push_directly(self._wire.rank, gradient)
            self._own.copy_to(self._wire.rank, parameters)
            self._updated()

    def _updated(self) -> None:
        if self._copies is not None:
            self._copies.updated(self.optimizer)

    def rest(self) -> None:
        if self._rule.holds:
            for rank in self._holders:
                self._wire.send(rank, Tag.PUSH, Message((_REST,)))

    @torch.no_grad()
    def refresh(self, parameters: Tensor) -> None:
        for rank in self._holders:
            self._wire.send(rank, Tag.PULL, Message((int(self._pushes),)))
        for rank in self._holders:
            message = self._wire.receive(rank, Tag.PULLED).result()[1]
            place = parameters[self.shards[rank]]
            self._hear(rank, message.number())
            place.copy_(message.vector(place.numel()))
        self._latest = parameters
        if self._received is not None:
            self._received.copy_(parameters)

    def pieces(self, rank: int) -> list[Piece]:
        with self._lock:
            found = super().pieces(rank)
        if self._copies is not None:
            found += list(self._copies.kept.values())
        if self._latest is not None:
            for its, updates in self._heard.items():
                told = {"parameters": kept(self._latest[self.shards[its]])}
                found.append(Piece(self.shards[its], updates, told, exact=self._own.tells_all and self._prepares))
        return found

    def carried(self) -> Vectors:
        kept = [(self.shards[rank], codec.residual) for rank, codec in self._up.items() if isinstance(codec, Feedback)]
        vectors = {name: owed.clone() for name, owed in self._owed.items()}
        if kept and self._owes not in vectors:
            vectors[self._owes] = torch.zeros(self._elements, device=self.optimizer.parameters.device)
        for place, residual in kept:
            vectors[self._owes][place] += residual
        if self._local is not None:
            vectors |= self._local.optimizer.packed(OPTIMIZER)
        return vectors

    def carry(self, vectors: Mapping[str, Tensor]) -> None:
        super().carry(vectors)
        if self._owes in self._owed:
            owed = self._owed[self._owes] = self._owed[self._owes].clone()
            for rank, codec in self._up.items():
                place = self.shards[rank]
                if isinstance(codec, Feedback):
                    codec.residual.copy_(owed[place])
                    owed[place] = 0
            if not owed.any():
                del self._owed[self._owes]
        if self._local is not None:
            self._local.optimizer.unpack(OPTIMIZER, vectors, "the worker's optimiser")

    @torch.no_grad()
    def _serve(self) -> None:
        """Answer whoever pushes, until the wire is closed."""
        parameters = self.optimizer.parameters
        while True:
            source, message = self._wire.receive(None, Tag.PUSH).result()
            kind, gradient = message.number(), message.without_numbers(1).on(parameters.device)
            with self._lock:
                if kind == _FETCH:
                    waiting = [source]
                elif kind == _REST:
                    waiting = self._own.rest(source)
                else:
                    with self._trace.span("update", self.optimizer.effort):
                        waiting = self._own.push(source, gradient, answer=kind == _EXCHANGE)
                        self._updated()
                answers = [(rank, self._answer(rank)) for rank in waiting]
            for rank, answer in answers:
                self._wire.send(rank, Tag.ANSWER, answer)

    def _answer(self, rank: int) -> Message:
        with self._trace.span("encode", self._own.effort):
            return self._own.answer(rank)

    @torch.no_grad()
    def _show(self) -> None:
        """Give the parameters as they are to whoever asks, until the wire is closed."""
        while True:
            source, message = self._wire.receive(None, Tag.PULL).result()
            with self._lock:
                self._wire.send(source, Tag.PULLED, self._own.pull(source, pushes=bool(message.number())))
