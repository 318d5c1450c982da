"""Workers of a server that push changes by several local steps (Async Local-SGD, Liu et al. 2024), each at its own pace."""

from __future__ import annotations

import torch
from torch import Tensor

from nmt_train.common.errors import NotFinite
from nmt_train.optim.flat_model import subtract
from nmt_train.server.every_step import EveryStep
from nmt_train.strategy.context import BuildContext
from nmt_train.strategy.local_steps import ChangesInFlight, LocalWork
from nmt_train.strategy.plan import ServerPlan
from nmt_train.strategy.state import WorkerState


class LocalSGD(EveryStep):
    """The model's parameters are the worker's own: `received`, the parameters after the last exchange, plus local steps."""

    def __init__(self, context: BuildContext, settings: ServerPlan) -> None:
        super().__init__(context, settings)
        self._every, self._work = settings.local.every, LocalWork(context)
        self.accumulator, self.received = self._work.accumulator, self._flat.parameters.clone()

    @property
    def learning_rate(self) -> float:
        return self._work.optimizer.learning_rate

    @property
    def mid_series(self) -> bool:
        return self._work.begun

    def step(self) -> bool:
        self.gradient_norm = self._work.step(self.optimizer, self._prepare)
        return self._advance()

    def _prepare(self, gradient: Tensor, weight: int) -> None:
        self._client.prepare(gradient, self._flat.parameters, weight)

    def _advance(self) -> bool:
        """After a local step; returns whether the worker has exchanged."""
        self._work.count()
        if self._work.since != self._every:
            return False
        self._exchange()
        return True

    @torch.no_grad()
    def _exchange(self) -> None:
        since, weight = self._work.take()
        change = subtract(self._flat.parameters, self.received, out=self._flat.gradient)
        try:
            self._client.exchange(change, self.received, weight)
        except NotFinite:  # the change is dropped: otherwise, this worker could never exchange again
            self._continue_from_received()
            raise
        finally:
            change.zero_()
        self._continue_from_received()
        self.steps[since] += 1

    def drain(self) -> None:
        if self._work.begun:
            self._exchange()
        self._client.leave_round()

    @torch.no_grad()
    def state(self) -> WorkerState:
        state = self._work.add_to(super().state())
        if self._work.begun:  # local steps that an exchange has not begun to send
            state = state.plus(WorkerState(unsent=self._client.contribution(self._local_change())))
        return state

    def _local_change(self) -> Tensor:
        """The change by the local steps since the last exchange."""
        return subtract(self._flat.parameters, self.received, out=torch.empty_like(self.received))

    def load(self, state: WorkerState) -> None:
        super().load(state)
        self._work.load(state, self.optimizer.updates)


class OverlappedLocalSGD(LocalSGD):
    """Local steps continue while the changes by earlier ones are exchanged (see `ChangesInFlight`).

    Each worker exchanges as often as its channel permits, as in `Overlap` (thesis 3.4).
    """

    max_in_flight = 1

    def __init__(self, context: BuildContext, settings: ServerPlan) -> None:
        super().__init__(context, settings)
        self._delay, self._changes = settings.local.delay, ChangesInFlight(context, self._send)
        self._result_taken = True  # whether no step was attempted since a result was taken

    @property
    def mid_series(self) -> bool:
        return not self._result_taken

    def step(self) -> bool:
        self._result_taken = False
        return super().step()

    def _advance(self) -> bool:
        self._work.count()
        due = self._changes.under_way and (self._changes.arrived or self._work.since >= self._delay)
        if due:
            self._take()
        if self._work.since >= self._every and not self._changes.under_way:
            self._give()
        return due

    def _send(self, change: Tensor, weight: int) -> None:
        self._client.exchange(change, self.received, weight)

    def _give(self) -> None:
        since, weight = self._work.take()
        self._changes.give(weight)
        self.steps[since] += 1

    def _take(self) -> None:
        """Wait for the exchange. If it raises NotFinite, all unsent changes are dropped."""
        self._result_taken = True
        try:
            self._changes.take(self.received)
        except NotFinite:
            self._continue_from_received()
            raise

    def drain(self) -> None:
        """If this raises NotFinite, call it again."""
        if self._changes.under_way:
            self._take()
        if self._work.begun:
            self._give()
            self._take()
        self._client.leave_round()

    def _continue_from_received(self) -> None:
        super()._continue_from_received()
        self._changes.begin_at(self.received)

    def _local_change(self) -> Tensor:
        return self._changes.unsent()
