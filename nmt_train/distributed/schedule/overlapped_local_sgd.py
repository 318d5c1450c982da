"""Local steps that continue while the deltas of earlier ones are exchanged (CoCoD-SGD, Shen et al. 2019).

A worker gives its delta to a background task and makes further local steps. When the exchange is complete, its parameters
become the received ones plus the changes that it has made in the meantime, which are part of its next delta.

If all workers exchange together, the result of an exchange is applied a fixed number of steps later, so replicas stay equal.
With a server, each worker exchanges as often as its channel permits, as in `Overlap` (thesis 3.4).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nmt_train.common.errors import NotFinite
from nmt_train.distributed.background import BackgroundTask, in_one_stage
from nmt_train.distributed.context import BuildContext
from nmt_train.distributed.exchange.exchange import Exchange
from nmt_train.distributed.exchange.worker_state import UNSENT, Vectors
from nmt_train.distributed.schedule.local_sgd import LocalSGD
from nmt_train.optim.flat_model import add, subtract


class OverlappedLocalSGD(LocalSGD):
    """Unsent changes begin at `_start`: the received parameters, plus the delta that is in flight, if any."""

    max_in_flight = 1

    def __init__(self, context: BuildContext, exchange: Exchange) -> None:
        super().__init__(context, exchange)
        self._delay = context.plan.local.delay
        self._start, self._given = self._flat.parameters.clone(), self._flat.gradient.clone()
        self._background = BackgroundTask[Callable[[], None]](context.transport, self._trace, in_one_stage(self._send))
        self._between = False  # whether a step was attempted since a result was taken

    @property
    def mid_accumulation(self) -> bool:
        """Rank 0 decides only after a result, when all workers have made as many exchanges."""
        return self._between

    def step(self) -> bool:
        self._between = True
        return super().step()

    def skip(self) -> bool:
        self._between = True
        return super().skip()

    def _count_step(self) -> bool:
        self._begun = True
        self._steps += 1
        self._since += 1
        received = False
        if self._background.under_way:
            early = self._background.ready and not self.exchange.synchronous
            if early or self._since >= self._delay:
                self._take()
                received = True
        if self._since >= self._every and not self._background.under_way:
            self._give()
        return received

    def _send(self, delta: Tensor, weight: int) -> Callable[[], None]:
        return self.exchange.begin(delta, self.received, weight)

    @torch.no_grad()
    def _give(self) -> None:
        since, self._since, self._begun = self._since, 0, False
        with self._trace.span("swap", self._given.numel()):
            subtract(self._flat.parameters, self._start, out=self._given)
            self._start.copy_(self._flat.parameters)
        self._background.give(self._given, self._take_worked())
        self.steps[since] += 1

    @torch.no_grad()
    def _take(self) -> None:
        """Wait for the exchange, and continue from the received parameters.

        If the exchange raises NotFinite, all unsent changes are dropped.
        """
        self._between = False
        delta, parameters = self._given, self._flat.parameters
        try:
            _, finish = self._background.take()
            finish()
        except NotFinite:
            self._start_from_received()
            raise
        with self._trace.span("swap", delta.numel()):
            subtract(parameters, self._start, out=delta)
            add(self.received, delta, out=parameters)
            self._start.copy_(self.received)

    def drain(self) -> None:
        """If this raises NotFinite, call it again."""
        if self._background.under_way:
            self._take()
        if self._begun:
            self._give()
            self._take()
        self.exchange.leave_round()

    def _start_from_received(self) -> None:
        super()._start_from_received()
        self._start.copy_(self.received)

    @torch.no_grad()
    def in_doubt(self) -> Vectors:
        if not self.exchange.synchronous or not self._background.under_way:
            return {}
        delta = subtract(self._start, self.received, out=torch.empty_like(self._start))
        return {UNSENT: self.exchange.interrupted_contribution(delta)}
