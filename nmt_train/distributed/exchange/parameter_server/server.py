"""An asynchronous parameter server in shards, one on every rank or fewer (thesis 3.3, 3.5, 3.6; sparse: 3.8, Algorithms 8, 9).

A worker pushes a slice of its gradient to every shard at once; each shard updates with what it gets, when it gets it, and
answers with its parameters, or with what changed since the worker's last answer.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nmt_train.distributed.codec import Codec
from nmt_train.distributed.codec.error_feedback import Feedback
from nmt_train.distributed.exchange import OPTIMIZER, RESIDUAL, UNSENT, Exchange, ExchangeConfig, Piece, Vectors
from nmt_train.distributed.exchange.parameter_server.replication import Copies
from nmt_train.distributed.exchange.parameter_server.shard import Shard
from nmt_train.distributed.exchange.parameter_server.update_rules import Rule
from nmt_train.distributed.message import Message
from nmt_train.distributed.transport import Future, Tag, Wire
from nmt_train.optim.flat_model import cut, kept
from nmt_train.optim.optimizer import Optimizer, OptimizerConfig
from nmt_train.optim.update_optimizers import Adder
from nmt_train.optim.worker_optimizer import OwnOptimizer
from nmt_train.trace import Trace

# What a worker wants of a shard, the first number of its messages: update and answer, one of them, or not to be waited for.
# Under another tag, while all rest: all parameters, to be waited for, or to go on from what it has; at any time: a copy.
_EXCHANGE, _GIVE, _FETCH, _REST, _ALL, _EXPECT, _HAS, _COPY = range(8)
_AHEAD = 2  # pushes that a worker may have given to a shard which has not yet applied them
_RECEIVED, _SEEN = "server.received", "server.seen"  # among the vectors that a worker carries


class Server(Exchange):
    """The worker's end and this rank's shard. `up` makes the codec of pushes, `down` that of deltas (None: parameters).

    delay: how many exchanges a gradient is behind the parameters that came last: 1 where exchanges overlap with computing.
    sums: gradients are joined by their sum, not by their mean (see joining.py).
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
        sums: bool = False,
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
        # Finished updates are each applied in full, unless the rule takes their mean.
        self._own = Shard(self.optimizer, up(), down() if down else None, rule, delay, self._whole, sums or at_worker)
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
        self.keeps = bool(self._others)
        self._applied: dict[int, deque[Future[Any]]] = defaultdict(deque)  # by rank, what it will say of pushes without answers
        if self._serves:
            wire.spawn("server", self._serve)
            wire.spawn("pulls", self._show)

    @property
    def updates(self) -> int:
        return self.optimizer.updates if self._serves else self._told

    @torch.no_grad()
    def prepare(self, gradient: Tensor, parameters: Tensor, weight: int = 1) -> None:
        if self.at_worker:
            super().prepare(gradient, parameters, weight)
            self._step(gradient, parameters)

    @torch.no_grad()
    def sync(self, gradient: Tensor, parameters: Tensor, weight: int = 1) -> None:
        weight = min(weight, 1) if self.at_worker else weight  # a mean of finished updates counts workers
        with self._trace.span("sync"):
            received = parameters if self._received is None else self._received
            if self._local is not None and not self.at_worker:
                self._newest = gradient.clone()
                self._step(self._newest, received)
            self._pay(self._owes, gradient)
            for rank in self._others:
                self._push(rank, gradient, received, _EXCHANGE, weight)
            if self._bypass:
                self._push_directly(gradient[self._shard], received[self._shard], weight)
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
    def give(self, gradient: Tensor, weight: int = 1) -> None:
        """`sync` without what comes back; until the gradient has left, and no shard has more than a few still to apply."""
        weight = min(weight, 1) if self.at_worker else weight
        with self._trace.span("sync"):
            self._pay(self._owes, gradient)
            self._wait_for_applied(_AHEAD - 1)
            received = gradient if self._received is None else self._received
            sent = []
            for rank in self._others:
                sent.append(self._push(rank, gradient, received, _GIVE, weight))
                self._applied[rank].append(self._wire.receive(rank, Tag.ANSWER))
            if self._bypass:
                with self._lock, self._trace.span("update", self.optimizer.effort):
                    self._own.push_directly(self._wire.rank, gradient[self._shard], weight)
                    self._updated()
            for done in sent:
                done.result()

    def _wait_for_applied(self, most: int) -> None:
        """Until at most so many pushes without answers are not known to be applied, by any shard."""
        for waiting in self._applied.values():
            while len(waiting) > most:
                with self._trace.span("waiting"):
                    waiting.popleft().result()

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

    def _push(self, rank: int, gradient: Tensor, received: Tensor, kind: int, weight: int) -> Any:
        part = gradient[self.shards[rank]]
        with self._trace.span("encode", self._up[rank].effort(part.numel())):
            message = self._up[rank].encode(part, self.updates)
            if self._own.knows_own:
                self._up[rank].add(message, received[self.shards[rank]])
        return self._wire.send(rank, Tag.PUSH, message.and_numbers(kind, weight))

    def _push_directly(self, gradient: Tensor, parameters: Tensor, weight: int) -> None:
        with self._lock, self._trace.span("update", self.optimizer.effort):
            self._own.push_directly(self._wire.rank, gradient, weight)
            self._own.copy_to(self._wire.rank, parameters)
            self._updated()

    def _updated(self) -> None:
        if self._copies is not None:
            self._copies.updated(self.optimizer)

    def rest(self) -> None:
        if self._rule.holds:
            for rank in self._holders:
                self._wire.send(rank, Tag.PUSH, Message((_REST, 0)))
                self._applied[rank].append(self._wire.receive(rank, Tag.ANSWER))
        self._wait_for_applied(0)

    @torch.no_grad()
    def refresh(self, parameters: Tensor) -> None:
        for rank, answer in self._ask(_ALL):
            message = answer.result()[1]
            place = parameters[self.shards[rank]]
            self._hear(rank, message.number())
            place.copy_(message.vector(place.numel()))
        self._latest = parameters
        if self._received is not None:
            self._received.copy_(parameters)

    @torch.no_grad()
    def settle(self, parameters: Tensor) -> None:
        """The worker keeps what it has received, and the shards what they know of that."""
        with self._lock:
            if self._own.flush():
                self._updated()
        for _, answer in self._ask(_EXPECT):
            self._told = answer.result()[1].number()

    def knows(self, vectors: Mapping[str, Tensor]) -> bool:
        return self._received is None or _RECEIVED in vectors

    @torch.no_grad()
    def restore(self, parameters: Tensor) -> None:
        received = parameters if self._received is None else self._received
        for _, answer in self._ask(_HAS, received):
            self._told = answer.result()[1].number()

    def copy(self) -> Future[Tensor]:
        which = int(self.optimizer.smoothed is not None)
        return Copy(self._elements, [(self.shards[rank], answer) for rank, answer in self._ask(_COPY, None, which)])

    def _ask(self, kind: int, has: Tensor | None = None, which: int = 0) -> list[tuple[int, Future[Any]]]:
        """Ask all shards, beside the pushes; their answers, by rank."""
        asked = []
        for rank in self._holders:
            vectors = () if has is None else (has[self.shards[rank]].clone(),)
            self._wire.send(rank, Tag.PULL, Message((kind, int(self._pushes), which), vectors))
            asked.append((rank, self._wire.receive(rank, Tag.PULLED)))
        return asked

    def snapshot(self) -> tuple[Vectors, dict[str, Any]]:
        with self._lock:
            return super().snapshot()

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
        if self._received is not None:
            vectors[_RECEIVED] = self._received
        seen = self._own.seen(self._wire.size)
        return vectors | {_SEEN: torch.tensor([self._wire.size, *seen.flatten().tolist()])}

    def rescued(self) -> Vectors:
        """All that are left go on from the same parameters."""
        return {name: vector for name, vector in self.carried().items() if name not in (_RECEIVED, _SEEN)}

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
        if self._received is not None and _RECEIVED in vectors:
            self._received.copy_(vectors[_RECEIVED])
        if _SEEN in vectors and vectors[_SEEN][0] == self._wire.size:  # among other ranks the numbers are others'
            self._own.load_seen(vectors[_SEEN][1:].view(self._wire.size, -1))

    @torch.no_grad()
    def _serve(self) -> None:
        """Answer whoever pushes, until the wire is closed."""
        while True:
            source, message = self._wire.receive(None, Tag.PUSH).result()
            with self._lock:
                waiting = self._serve_one(source, message)
                answers = [(rank, self._answer(rank)) for rank in waiting]
            if message.number() in (_GIVE, _REST):  # an empty answer: it is done
                answers.append((source, Message((self.optimizer.updates,))))
            for rank, answer in answers:
                self._wire.send(rank, Tag.ANSWER, answer)

    def _serve_one(self, source: int, message: Message) -> list[int]:
        """Whom to answer, now that this message has come."""
        kind = message.number()
        if kind == _FETCH:
            return [source]
        if kind == _REST:
            return self._own.rest(source)
        gradient = message.without_numbers(2).on(self.optimizer.parameters.device)
        with self._trace.span("update", self.optimizer.effort):
            waiting = self._own.push(source, gradient, answer=kind == _EXCHANGE, weight=message.number(1))
            self._updated()
        return waiting

    def _answer(self, rank: int) -> Message:
        with self._trace.span("encode", self._own.effort):
            return self._own.answer(rank)

    @torch.no_grad()
    def _show(self) -> None:
        """Give the parameters as they are to whoever asks, until the wire is closed."""
        while True:
            source, message = self._wire.receive(None, Tag.PULL).result()
            with self._lock:
                answer = self._show_one(source, message)
            self._wire.send(source, Tag.PULLED, answer)

    def _show_one(self, source: int, message: Message) -> Message:
        """The answer to `_ask`."""
        kind, pushes, which = message.number(), bool(message.number(1)), message.number(2)
        optimizer = self.optimizer
        if kind == _COPY:
            asked = optimizer.smoothed if which and optimizer.smoothed is not None else optimizer.parameters
            return Message((optimizer.updates,), (asked.clone(),))
        if kind == _ALL:
            return self._own.pull(source, pushes)
        if pushes:
            self._own.expect(source)
        if kind == _HAS:
            self._own.has(source, message.vector(optimizer.parameters.numel()))
        return Message((optimizer.updates,))


class Copy:
    """A vector (elements,) whose slices are on their way; a future."""

    def __init__(self, elements: int, parts: list[tuple[slice, Future[Any]]]) -> None:
        self._elements, self._parts = elements, parts

    def done(self) -> bool:
        return all(part.done() for _, part in self._parts)

    def result(self) -> Tensor:
        vector = torch.empty(self._elements)
        for place, part in self._parts:
            vector[place] = part.result()[1].vector(place.stop - place.start)
        return vector
