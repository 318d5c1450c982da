"""Exchange without a server: workers send changes (quantized updates) to all others while they compute (Strom 2015, 2.6).

Messages hold plus or minus a threshold, which is a multiple of 2^-30. Workers add them up in 64 bits, where such sums are
exact. Therefore the order of arrival does not matter: after all messages have arrived, all workers have bit-identical
parameters.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nmt_train.codec.error_feedback import ErrorFeedback
from nmt_train.codec.strom_threshold import GRAIN
from nmt_train.common.message import Message
from nmt_train.optim.update_optimizers import UpdateAdder
from nmt_train.optim.worker_optimizer import WorkerOptimizer
from nmt_train.strategy.context import BuildContext
from nmt_train.strategy.plan import PeersPlan
from nmt_train.strategy.recovery_piece import RecoveryPiece
from nmt_train.strategy.replica_check import compare
from nmt_train.strategy.state import WorkerState
from nmt_train.strategy.strategy import Completed, Strategy
from nmt_train.transport import Future, Tag

_CHANGE, _ALL = 1, 0  # first number of a message: it is a change, or the sender has sent all its changes


class Strom(Strategy):
    """Every rank holds all parameters; checkpoints save those of rank 0.

    If a rank ends, the others continue from the replica with the most changes. A change that has been sent is not owed again,
    because others may have it; the log says how many updates are lost.

    A rank's own optimizer (`_worker_optimizer`) turns its gradient into a change, of which it sends the elements that reach the
    threshold; the rest stays in the residual of `_codec`. `optimizer` adds the changes of all ranks to the replica: exactly in
    `_sums`, from which `_publish` copies them to fp32.
    """

    def __init__(self, context: BuildContext, settings: PeersPlan) -> None:
        plan, transport, parameters = context.plan, context.transport, context.flat.parameters
        replica = UpdateAdder(plan.optimizer, parameters.clone())
        super().__init__(context, replica, [slice(0, parameters.numel())] * transport.size)
        self._transport, self._own_updates = transport, settings.own_updates
        self._sums = torch.empty_like(parameters, dtype=torch.float64)  # the parameters, rounded to multiples of GRAIN
        self._codec = ErrorFeedback(context.codec(settings.up, plan.dropped_up), torch.zeros_like(parameters))
        self._worker_optimizer = WorkerOptimizer(plan.optimizer, context.flat, self.optimizer, context.trace)
        # Every rank starts with a different peer; otherwise all ranks would send to the same one first.
        self._others = [*range(transport.rank + 1, transport.size), *range(transport.rank)]
        self._lock, self._heard_all = transport.lock(), transport.event()
        self._complete: set[int] = set()  # peers that have sent all their changes
        self._unpublished = 0  # updates that are not in `optimizer.parameters` yet
        self._leaving: list[Future[None]] = []  # the sends of the last change, one to every peer
        self._round()
        if self._others:
            transport.spawn("peers", self._hear)

    @torch.no_grad()
    def _exchange(self) -> None:
        gradient, parameters = self._flat.gradient, self._flat.parameters
        self.gradient_norm, weight = self.accumulator.join(gradient, self._clipping)
        self._add_debt(gradient, weight)
        self._worker_optimizer.step(gradient, parameters, self.updates)  # the gradient becomes an update
        with self._trace.span("sync"):
            self._wait_for_the_last()
            self._pay_debt()  # the codec keeps what it does not send
            with self._trace.span("encode", self._codec.cost_elements(gradient.numel())):
                message = self._codec.encode(gradient, self.updates)
            self._leaving = [self._transport.send(rank, Tag.PEER, message.and_numbers(_CHANGE)) for rank in self._others]
            with self._lock:
                self._add_change(message)
                self._publish()
            self._copy_replica()

    def copy(self) -> Future[Tensor]:
        """A copy, because a background task may change the parameters while it is used."""
        with self._lock:
            return Completed(super().copy().result().clone())

    def _copy_replica(self) -> None:
        """Set the worker's parameters to the replica, plus what it has not sent yet (own_updates; not in the paper)."""
        self._flat.parameters.copy_(self.optimizer.parameters)
        if self._own_updates:
            self._flat.parameters.add_(self._codec.residual)

    def _wait_for_the_last(self) -> None:
        """Wait until the last change has been sent: on a slow link, messages would otherwise queue and grow ever more stale."""
        with self._trace.span("waiting"):
            for left in self._leaving:
                left.result()

    def _add_change(self, message: Message) -> None:
        with self._trace.span("decode", self._sums.numel()):
            self._codec.add(message, self._sums)
        self.optimizer.updates += 1
        self._unpublished += 1

    def _publish(self) -> None:
        """Copy the exact sums to the parameters. Each change since the last call counts as an update in the running mean."""
        self.optimizer.parameters.copy_(self._sums)
        self.optimizer.smooth(self._unpublished)
        self._unpublished = 0

    @torch.no_grad()
    def _hear(self) -> None:
        """Apply the changes of the other ranks until the transport is closed."""
        while True:
            source, message = self._transport.receive(None, Tag.PEER).result()
            if message.number() == _CHANGE:
                with self._lock:
                    self._add_change(message.without_numbers(1))
            else:
                self._complete.add(source)
                if len(self._complete) == len(self._others):
                    self._heard_all.set()

    @torch.no_grad()
    def refresh(self) -> None:
        """Wait until all changes have arrived; raises UserError if the replicas then differ."""
        for rank in self._others:
            self._transport.send(rank, Tag.PEER, Message((_ALL,)))
        if self._others:
            self._heard_all.wait()
            self._heard_all.clear()
            self._complete.clear()
        with self._lock:
            self._publish()
            self._round()  # before `compare`: the next rank trains on when it has this rank's checksum, and sends changes
        compare(self._transport, self.optimizer.parameters)
        self._copy_replica()

    def _round(self) -> None:
        """Set the exact sums to the fp32 parameters, rounded to multiples of GRAIN: a checkpoint has only the fp32 ones."""
        torch.div(self.optimizer.parameters.double(), GRAIN, out=self._sums).round_().mul_(GRAIN)

    @torch.no_grad()
    def pieces(self) -> list[RecoveryPiece]:
        with self._lock:
            self.optimizer.parameters.copy_(self._sums)
            # `exact` is False: two ranks with the same number of changes need not have the same changes.
            return [replace(self.piece(), exact=False)]

    def state(self) -> WorkerState:
        return replace(self._debt, unsent=self._codec.residual, optimizer=self._worker_optimizer.optimizer.packed())

    def load(self, state: WorkerState) -> None:
        super().load(state)
        self._codec.residual.zero_()
        if self._debt.unsent is not None:
            self._codec.residual.add_(self._debt.unsent)
            self._debt.unsent = None
        self._worker_optimizer.optimizer.unpack(state.optimizer, "the worker's optimizer")
        self._round()
