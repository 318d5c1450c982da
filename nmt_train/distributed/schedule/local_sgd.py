"""Local SGD and its variants: each worker makes local steps, then all workers exchange their deltas.

A delta is the change of a worker's parameters since the last exchange; the worker sends it as a finished update. The exchange
averages the deltas after a fixed number of steps (Stich 2019) or once at the end (Zinkevich et al. 2010, thesis 2.3.1), or an
outer optimizer takes them as its gradient (DiLoCo, Douillard et al. 2023; one by one: Async Local-SGD, Liu et al. 2024).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from nmt_train.common.errors import NotFinite
from nmt_train.distributed.context import BuildContext
from nmt_train.distributed.exchange.exchange import Exchange
from nmt_train.distributed.exchange.worker_state import LOCAL_STEPS, OPTIMIZER, UNSENT, Vectors
from nmt_train.distributed.schedule.schedule import Schedule
from nmt_train.optim.flat_model import subtract
from nmt_train.optim.gradient_accumulation import GradientAccumulator
from nmt_train.optim.optimizer import Optimizer


class LocalSGD(Schedule):
    updates = True

    def __init__(self, context: BuildContext, exchange: Exchange) -> None:
        super().__init__(context, exchange)
        self.accumulator = GradientAccumulator(sums=False)  # each local step is a separate update
        self._every = context.plan.local.every
        self.endless = self._every == 0
        self._inner = Optimizer(dataclasses.replace(context.plan.optimizer, smoothing=0.0), self._flat.parameters)
        self.received = self._start = self._flat.parameters.clone()  # the parameters after the last exchange
        self._steps = self._since = 0  # local steps in total; since the last exchange
        self._on_its_way = False  # whether an exchange is in flight
        self._begun = False  # whether a step was attempted since the last delta was sent, even a non-finite one
        self._worked = False  # whether any of these steps had a batch: the mean leaves out workers without one

    @property
    def mid_accumulation(self) -> bool:
        return self._begun

    @property
    def learning_rate(self) -> float:
        return self._inner.learning_rate

    def step(self) -> bool:
        """Make a local step. A non-finite step is not counted, so that all workers exchange after the same number."""
        gradient, self._begun, self._worked = self._flat.gradient, True, True
        try:
            self.exchange.gradient_norm, weight = self.accumulator.join(gradient, self._clip_norm)
            self.exchange.prepare(gradient, self._flat.parameters, weight)
            self._inner.follow(self.exchange.optimizer, self._steps)
            with self._trace.span("update", gradient.numel()):
                self._inner.apply(gradient)
        finally:
            gradient.zero_()
        return self._count_step()

    def skip(self) -> bool:
        return self._count_step()

    def _count_step(self) -> bool:
        self._begun = True
        self._steps += 1
        self._since += 1
        if self._since != self._every:
            return False
        self._exchange()
        return True

    def _take_worked(self) -> int:
        worked, self._worked = self._worked, False
        return int(worked)

    @torch.no_grad()
    def _exchange(self) -> None:
        since, self._since, self._begun, self._on_its_way = self._since, 0, False, True
        weight = self._take_worked()
        delta = self._flat.gradient
        subtract(self._flat.parameters, self._start, out=delta)
        try:
            finish = self.exchange.begin(delta, self._start, weight)
            self._on_its_way = False  # from here on, an update that this worker has made includes the delta
            finish()
        except NotFinite:  # the delta is dropped: otherwise, this worker could never exchange again
            self._on_its_way = False
            self._start_from_received()
            raise
        finally:
            delta.zero_()
        self._start_from_received()
        self.steps[since] += 1

    def drain(self) -> None:
        if self._begun:
            self._exchange()
        self.exchange.leave_round()

    def own_state(self) -> Vectors:
        return self._inner.packed(OPTIMIZER) | {LOCAL_STEPS: torch.tensor([self._steps])}

    @torch.no_grad()
    def rescued(self) -> Vectors:
        """Includes the delta since the last exchange, which has not been sent."""
        rescued = super().rescued()
        if self._begun:
            delta = self.exchange.contribution(self._delta())
            rescued[UNSENT] = rescued[UNSENT] + delta if UNSENT in rescued else delta
        return rescued

    @torch.no_grad()
    def in_doubt(self) -> Vectors:
        """The delta of an interrupted exchange. If the others received it, it is part of an update that they have made."""
        under_way = self.exchange.synchronous and self._on_its_way and not self._begun
        return {UNSENT: self.exchange.interrupted_contribution(self._delta())} if under_way else {}

    def _delta(self) -> Tensor:
        return subtract(self._flat.parameters, self._start, out=torch.empty_like(self._start))

    def load_worker_state(self, vectors: Mapping[str, Tensor]) -> None:
        super().load_worker_state(vectors)
        self._inner.unpack(OPTIMIZER, vectors, "the worker's optimizer")
        # A state from another mode has no step count: use the number of updates, which the optimizer of every rank knows.
        self._steps = int(vectors[LOCAL_STEPS][0]) if LOCAL_STEPS in vectors else self.exchange.optimizer.updates
