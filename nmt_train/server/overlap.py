"""Overlap of exchange and computation: a background task exchanges gradients while the worker accumulates the next ones.

Thesis 3.4, Algorithms 5 (background task) and 6 (worker).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from nmt_train.common.errors import NotFinite
from nmt_train.optim.optimizer import Optimizer, divide_and_clip
from nmt_train.server.every_step import EveryStep
from nmt_train.strategy.background import BackgroundTask, in_one_stage
from nmt_train.strategy.context import BuildContext
from nmt_train.strategy.plan import ServerPlan
from nmt_train.strategy.state import WorkerState

_PREFIX = "local_optimizer."  # name prefix, in a worker's state, of the vectors of the optimizer of its own parameters


class Overlap(EveryStep):
    """Accumulates gradients in the flat gradient. When an exchange is over, the worker continues from the received parameters
    (Algorithm 6), and a background task exchanges the gradient that has accumulated, or the client's update by it.
    """

    max_in_flight = 1

    def __init__(self, context: BuildContext, settings: ServerPlan) -> None:
        super().__init__(context, settings)
        flat, transport = self._flat, context.transport
        self._bound, self._local_update = settings.overlap.bound, settings.overlap.local_update
        self.received = flat.parameters.clone()
        self._payload = flat.gradient.clone()  # the gradient or update being exchanged
        self._step_gradient = flat.gradient.clone() if self._local_update == "optimizer" else None
        # What updates the model's parameters while an exchange is in flight (`overlap.local_update`). If the client turns
        # gradients into updates, the worker only adds these.
        own = self._local_update == "optimizer" or (self._local_update == "sum" and not self._client.prepares_updates)
        config = dataclasses.replace(context.plan.optimizer, smoothing=0.0)
        self._interim = Optimizer(config, flat.parameters, flat.matrices()) if own else None
        self._answered = False  # whether `received` is newer than the model's parameters
        self._background = BackgroundTask[None](transport, self._trace, in_one_stage(self._exchange_payload))

    def _exchange_payload(self, payload: Tensor, weight: int) -> None:
        """The background task (Algorithm 5)."""
        self._client.exchange(payload, self.received, weight)

    def step(self) -> bool:
        self._accumulated += 1
        in_flight = self._background.under_way and not self._background.ready
        if in_flight and (not self._bound or self._accumulated < self._bound):
            self._update_locally()
            return False
        self._take()
        self._swap()
        return True

    def drain(self) -> None:
        """Exchange the accumulated gradient and take the received parameters. If this raises NotFinite, call it again."""
        self._take()
        if self._accumulated:
            self._swap()
            self._take()
        if self._answered:
            self._flat.parameters.copy_(self.received)
            self._answered = False
        self._client.leave_round()

    def _take(self) -> None:
        """Wait for the exchange that is in flight, if any. Raises NotFinite if its update was not finite, and was not sent."""
        if not self._background.under_way:
            return
        try:
            self._background.take()
        except NotFinite:
            self._flat.parameters.copy_(self.received)  # the model's may include this update (`overlap.local_update`)
            raise
        self._answered = True

    def _swap(self) -> None:
        """Continue from the received parameters, and give the accumulated gradient to the background task."""
        gradient = self._flat.gradient
        steps, self._accumulated = self._accumulated, 0
        try:
            self.gradient_norm, weight = self.accumulator.join(gradient, self._clipping)
            self._client.prepare(gradient, self._flat.parameters, weight)
            with self._trace.span("swap", gradient.numel()):
                self._payload.copy_(gradient)
                if self._answered:
                    self._flat.parameters.copy_(self.received)
            if self._local_update == "sum":
                self._lay_over(gradient)
        finally:
            gradient.zero_()
            if self._step_gradient is not None:
                self._step_gradient.zero_()
        self._answered = False
        self.steps[steps] += 1
        self._background.give(self._payload, weight)

    @torch.no_grad()
    def _lay_over(self, payload: Tensor) -> None:
        """Apply the gradient or update that was just sent to the received parameters, which do not include it yet."""
        if self._interim is None:
            self._flat.parameters.add_(payload)  # an update
        else:
            with self._trace.span("update", payload.numel()):
                self._interim.follow(self.optimizer, self.updates)
                self._interim.apply(payload)

    def _update_locally(self) -> None:
        """Between two exchanges: update by the gradient of the last step, by which the accumulated gradient has changed."""
        if self._interim is None or self._step_gradient is None:
            return
        newest = self._flat.gradient - self._step_gradient
        self._step_gradient.copy_(self._flat.gradient)
        try:
            divide_and_clip(newest, self._clipping, self.accumulator.factor)
        except NotFinite:  # the accumulated gradient is not finite either
            self.accumulator.take()
            self._accumulated = 0
            self._flat.gradient.zero_()
            self._step_gradient.zero_()
            raise
        self._interim.follow(self.optimizer, self.updates)
        self._interim.apply(newest)

    def state(self) -> WorkerState:
        state = super().state()
        own = {} if self._interim is None else {_PREFIX + name: vector for name, vector in self._interim.packed().items()}
        return dataclasses.replace(state, own=state.own | own)

    def load(self, state: WorkerState) -> None:
        super().load(state)
        if self._interim is not None:
            own = {name.removeprefix(_PREFIX): vector for name, vector in state.own.items() if name.startswith(_PREFIX)}
            self._interim.unpack(own, "the worker's local optimizer")
