"""Overlap of exchange and computation: a background task exchanges gradients while the worker accumulates the next ones.

Thesis 3.4, Algorithms 5 (background task) and 6 (worker).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from nmt_train.common.errors import NotFinite
from nmt_train.distributed.context import BuildContext
from nmt_train.distributed.plan import ServerPlan
from nmt_train.distributed.server.every_step import EveryStep
from nmt_train.distributed.state import WorkerState
from nmt_train.optim.optimizer import Optimizer, clip

_PREFIX = "local_optimizer."  # name prefix, in a worker's state, of the vectors of the optimizer of its own parameters


class Overlap(EveryStep):
    """Accumulates gradients in the flat gradient. Whenever the background task is idle, the worker takes the received
    parameters from it and gives it the accumulated gradient.
    """

    max_in_flight = 1

    def __init__(self, context: BuildContext, settings: ServerPlan) -> None:
        super().__init__(context, settings)
        flat, transport = self._flat, context.transport
        self._bound, self._local_update = settings.overlap.bound, settings.overlap.local_update
        self.received = flat.parameters.clone()
        self._payload, self._weight = flat.gradient.clone(), 0  # the gradient or update being exchanged, and its weight
        self._step_gradient = flat.gradient.clone() if self._local_update == "optimizer" else None
        # What updates the model's parameters while an exchange is in flight (`overlap.local_update`). If the client turns
        # gradients into updates, the worker only adds these.
        own = self._local_update == "optimizer" or (self._local_update == "sum" and not self._client.prepares_updates)
        config = dataclasses.replace(context.plan.optimizer, smoothing=0.0)
        self._interim = Optimizer(config, flat.parameters) if own else None
        self._in_flight = False
        self._work, self._idle = transport.event(), transport.event()
        self._idle.set()
        self._task = transport.spawn("background task", self._run)

    def step(self) -> bool:
        if self._task.done():
            self._task.result()  # raises the error of a failed exchange; otherwise, the worker would wait forever
        self._accumulated += 1
        if not self._idle.is_set():
            if not self._bound or self._accumulated < self._bound:
                self._update_locally()
                return False
            with self._trace.span("waiting"):
                self._idle.wait()
        return self._swap()

    def drain(self) -> None:
        """Exchange the accumulated gradient and take the received parameters. If this raises NotFinite, call it again."""
        self._wait()
        if self._accumulated:
            self._swap()
            self._wait()
        if self._in_flight:
            self._flat.parameters.copy_(self.received)
            self._in_flight = False
        self._client.leave_round()

    def _wait(self) -> None:
        with self._trace.span("waiting"):
            self._idle.wait()
        if self._task.done():
            self._task.result()

    def _swap(self) -> bool:
        """Take the received parameters from the background task, and give it the accumulated gradient."""
        gradient = self._flat.gradient
        steps, self._accumulated = self._accumulated, 0
        try:
            self.gradient_norm, self._weight = self.accumulator.join(gradient, self._clip_norm)
            self._client.prepare(gradient, self._flat.parameters, self._weight)
            with self._trace.span("swap", gradient.numel()):
                self._payload.copy_(gradient)
                if self._in_flight:
                    self._flat.parameters.copy_(self.received)
            if self._local_update == "sum":
                self._lay_over(gradient)
        finally:
            gradient.zero_()
            if self._step_gradient is not None:
                self._step_gradient.zero_()
        self._in_flight = True
        self.steps[steps] += 1
        self._idle.clear()
        self._work.set()
        return True

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
            clip(newest, self._clip_norm, self.accumulator.factor)
        except NotFinite:  # the accumulated gradient is not finite either
            self.accumulator.take()
            self._accumulated = 0
            self._flat.gradient.zero_()
            self._step_gradient.zero_()
            raise
        self._interim.follow(self.optimizer, self.updates)
        self._interim.apply(newest)

    def _run(self) -> None:
        """The background task (Algorithm 5)."""
        while True:
            self._work.wait()
            self._work.clear()
            self._client.exchange(self._payload, self.received, self._weight)
            self._idle.set()

    def state(self) -> WorkerState:
        state = super().state()
        own = {} if self._interim is None else {_PREFIX + name: vector for name, vector in self._interim.packed().items()}
        return dataclasses.replace(state, own=state.own | own)

    def load(self, state: WorkerState) -> None:
        super().load(state)
        if self._interim is not None:
            own = {name.removeprefix(_PREFIX): vector for name, vector in state.own.items() if name.startswith(_PREFIX)}
            self._interim.unpack(own, "the worker's local optimizer")
