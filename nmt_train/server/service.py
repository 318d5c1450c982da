"""Serves a rank's shard to all workers: two tasks answer their requests (thesis 3.3, 3.6)."""

from __future__ import annotations

import torch
from torch import Tensor

from nmt_train.common.message import Message
from nmt_train.server.replication import Replication
from nmt_train.server.requests import Pull, Push
from nmt_train.server.shard import Shard
from nmt_train.strategy.recovery_piece import RecoveryPiece
from nmt_train.trace import Trace
from nmt_train.transport import Tag, Transport


class ShardService:
    """Locks the shard while it uses it, except in `seen` and `load_seen`, during which no request is served.

    replication: copies the shard to another machine.
    """

    def __init__(self, shard: Shard, transport: Transport, trace: Trace, replication: Replication | None = None) -> None:
        self._shard, self._transport, self._trace, self._replication = shard, transport, trace, replication
        self.optimizer, self.staleness = shard.optimizer, shard.staleness
        self._lock = transport.lock()
        self.serves = self.optimizer.parameters.numel() > 0
        if self.serves:
            transport.spawn("server", self._serve_pushes)
            transport.spawn("pulls", self._serve_pulls)

    def push_directly(self, gradient: Tensor, weight: int, parameters: Tensor | None = None) -> None:
        """Push the gradient of this rank's own worker, and copy the shard to `parameters`; the gradient may be overwritten."""
        with self._lock, self._trace.span("update", self.optimizer.cost_elements):
            self._shard.push_directly(self._transport.rank, gradient, weight)
            if parameters is not None:
                self._shard.copy_to(self._transport.rank, parameters)
            self._updated()

    def copy_to(self, parameters: Tensor) -> None:
        """Copy the shard's parameters to `parameters`, those of this rank's own worker."""
        with self._lock:
            self._shard.copy_to(self._transport.rank, parameters)

    def flush(self) -> None:
        """Apply an incomplete bundle of pushes."""
        with self._lock:
            if self._shard.flush():
                self._updated()

    def pieces(self, place: slice, replicas: bool = False) -> list[RecoveryPiece]:
        """A copy of this shard (the slice `place` of the parameters); if `replicas`, also the copies of other ranks' shards."""
        with self._lock:
            self._shard.flush()  # workers have been answered for these pushes, so they will not repeat them
            found = [RecoveryPiece.of(place, self.optimizer)]
        return found + (list(self._replication.copies.values()) if replicas and self._replication is not None else [])

    def seen(self, workers: int) -> Tensor:
        """See `Shard.seen`."""
        return self._shard.seen(workers)

    def load_seen(self, table: Tensor) -> None:
        """See `Shard.load_seen`."""
        self._shard.load_seen(table)

    def _updated(self) -> None:
        if self._replication is not None:
            self._replication.updated(self.optimizer)

    @torch.no_grad()
    def _serve_pushes(self) -> None:
        """Answer pushes until the transport is closed."""
        while True:
            source, message = self._transport.receive(None, Tag.PUSH).result()
            with self._lock:
                waiting = self._push(source, message)
                answers = [(rank, self._answer(rank)) for rank in waiting]
            if message.number() in (Push.GIVE, Push.REST):
                answers.append((source, Message((self.optimizer.updates,))))
            for rank, answer in answers:
                self._transport.send(rank, Tag.ANSWER, answer)

    def _push(self, source: int, message: Message) -> list[int]:
        """Process a push; returns the workers to answer now."""
        kind = message.number()
        if kind == Push.FETCH:
            return [source]
        if kind == Push.REST:
            return self._shard.leave_round(source)
        gradient = message.without_numbers(2).on(self.optimizer.parameters.device)
        with self._trace.span("update", self.optimizer.cost_elements):
            waiting = self._shard.push(source, gradient, answer=kind == Push.EXCHANGE, weight=message.number(1))
            self._updated()
        return waiting

    def _answer(self, rank: int) -> Message:
        with self._trace.span("encode", self._shard.cost_elements(rank)):
            return self._shard.answer(rank)

    @torch.no_grad()
    def _serve_pulls(self) -> None:
        """Answer pulls until the transport is closed."""
        while True:
            source, message = self._transport.receive(None, Tag.PULL).result()
            with self._lock:
                answer = self._pull(source, message)
            self._transport.send(source, Tag.PULLED, answer)

    def _pull(self, source: int, message: Message) -> Message:
        """The answer: the number of updates, and parameters if they are asked for."""
        kind, pushes, wants_mean = message.number(), bool(message.number(1)), bool(message.number(2))
        optimizer = self.optimizer
        if kind == Pull.COPY:
            asked = optimizer.smoothed if wants_mean and optimizer.smoothed is not None else optimizer.parameters
            return Message((optimizer.updates,), (asked.clone(),))
        if kind == Pull.ALL:
            return self._shard.pull(source, pushes)
        if pushes:
            self._shard.expect(source)
        if kind == Pull.HAS:
            self._shard.has(source, message.vector(optimizer.parameters.numel()))
        return Message((optimizer.updates,))
