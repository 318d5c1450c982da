"""Local SGD and its variants: each worker makes local steps, then all workers exchange the changes of their parameters.

The exchange averages the changes after a fixed number of steps (Stich 2019) or once at the end (Zinkevich et al. 2010, thesis
2.3.1), adds them up (SparseLoCo), or an outer optimizer takes their mean as its gradient (DiLoCo, Douillard et al. 2023).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nmt_train.common.errors import NotFinite
from nmt_train.optim.flat_model import subtract
from nmt_train.optim.optimizer import Clipping, divide_and_clip
from nmt_train.replicas.reducer import Reduction
from nmt_train.replicas.reducers import REDUCERS
from nmt_train.strategy.context import BuildContext
from nmt_train.strategy.debt import Debt
from nmt_train.strategy.local_steps import ChangesInFlight, LocalWork, outer_optimizer
from nmt_train.strategy.plan import ReplicasPlan
from nmt_train.strategy.replica_check import compare
from nmt_train.strategy.state import WorkerState
from nmt_train.strategy.strategy import Strategy

_KEEPS_OWN = "keeps_own"  # says, in the state of a worker, that `received` includes its residual


class LocalSGD(Strategy):
    """The inner optimizer, in `_work`, makes local steps with the model's parameters. The outer one, `optimizer`, updates a
    replica of the global parameters by the changes of all workers' parameters, new minus old (see update_optimizers.py).

    received: the parameters after the last exchange: the replica, and with `replicas.own_updates` also the residual, which
    later messages add to all replicas.
    """

    def __init__(self, context: BuildContext, settings: ReplicasPlan) -> None:
        parameters, ranks, local = context.flat.parameters, context.transport.size, settings.local
        self._reducer = REDUCERS[settings.reducer].build(context, settings)
        outer = outer_optimizer(local, context.plan.optimizer, parameters.clone())
        super().__init__(context, outer, [slice(0, parameters.numel())] * ranks)
        self._transport, self._every, self._work = context.transport, local.every, LocalWork(context)
        self.accumulator, self.received = self._work.accumulator, parameters.clone()
        self._sums = local.outer == "sum"
        self._share = 1.0 if self._sums else 1 / ranks  # of a worker's change in what the outer optimizer gets
        own = settings.own_updates and self._reducer.residual is not None
        self._keeps_own = own and local.outer != "nesterov"  # which applies what the residual holds in part, and later again
        self._continues = False  # whether the loaded state was of this strategy
        self._in_flight = False  # whether an exchange has begun
        self._gradient_debt = Debt()  # the residual of a loaded state, which is in the next local step
        self._debt_left: Tensor | None = None  # what remains of the debt after the exchange that includes it

    @property
    def learning_rate(self) -> float:
        return self._work.optimizer.learning_rate

    @property
    def mid_series(self) -> bool:
        return self._work.begun

    def step(self) -> bool:
        self.gradient_norm = self._work.step(self.optimizer, self._with_residual)
        return self._advance()

    def _with_residual(self, gradient: Tensor, weight: int) -> None:
        """Include a loaded residual in a local step."""
        if weight:
            self._gradient_debt.include(gradient)

    def skip(self) -> bool:
        return self._advance()

    def _advance(self) -> bool:
        """After a local step; returns whether the workers have exchanged."""
        self._work.count()
        if self._work.since != self._every:
            return False
        self._exchange()
        return True

    @torch.no_grad()
    def _exchange(self) -> None:
        since, weight = self._work.take()
        self._in_flight = True
        change = subtract(self._flat.parameters, self.received, out=self._flat.gradient)  # its memory is free now
        try:
            joined = self._reduce(change, weight)
            self._in_flight = False  # `rescue` no longer counts the change as doubtful
            self._apply(change, joined)
        except NotFinite:  # the change is dropped: otherwise, this worker could never exchange again
            self._in_flight = False
            self._continue_from_received()
            raise
        finally:
            change.zero_()
        self._continue_from_received()
        self.steps[since] += 1

    def _reduce(self, change: Tensor, weight: int) -> Reduction:
        """Sum the changes of all workers in place. weight: see `LocalWork.take`."""
        debt = self._debt.unsent if weight else None
        if debt is not None:  # all of it counts, but a mean takes only a share of what workers send
            change.add_(debt, alpha=1 / (self._share * self._reducer.rate))
            self._debt_included = True
        with self._trace.span("sync"):
            joined = self._reducer.reduce(change, self.updates, weight)
        taken = 1.0 if self._share == 1.0 else 1 / (joined.weight * self._share or 1.0)
        # In a mean over fewer workers, each has a larger share: the next exchange takes back what was added too much.
        self._debt_left = debt * (1 - taken) if debt is not None and taken != 1.0 else None
        return joined

    @torch.no_grad()
    def _apply(self, total: Tensor, joined: Reduction) -> None:
        """Update the replica and `received`. Raises NotFinite, on all ranks alike, if the sum is not finite."""
        try:
            divide_and_clip(total, Clipping(0.0), 1.0 if self._sums else joined.divisor)  # no limit: it only divides
        except NotFinite:
            self._debt_included = False  # the next change includes it
            self._gradient_debt.settle(sent=False)
            self._reducer.undo()
            raise
        self._gradient_debt.settle(sent=True)
        if self._debt_included:
            self._debt.unsent, self._debt_included = self._debt_left, False
        with self._trace.span("update", self.optimizer.cost_elements):
            self.optimizer.apply(total)
        self._reducer.applied()
        self._receive()

    def _receive(self) -> None:
        self.received.copy_(self.optimizer.parameters)
        if self._keeps_own:
            with self._trace.span("swap", self.received.numel()):
                self._include_residual()

    def _include_residual(self) -> None:
        if self._reducer.residual is not None:
            self.received.add_(self._reducer.residual, alpha=self._share)

    def _continue_from_received(self) -> None:
        self._flat.parameters.copy_(self.received)

    def drain(self) -> None:
        if self._work.begun:
            self._exchange()

    def refresh(self) -> None:
        compare(self._transport, self.optimizer.parameters)
        self.received.copy_(self.optimizer.parameters)
        self._continue_from_received()

    def prepare_snapshot(self) -> None:
        if self._keeps_own:
            compare(self._transport, self.optimizer.parameters)
        else:
            self.refresh()

    def resume(self) -> None:
        self.refresh()
        if self._continues:
            self._include_residual()
            self._continue_from_received()

    @torch.no_grad()
    def state(self) -> WorkerState:
        return self._state(self._debt)

    def _state(self, debt: WorkerState) -> WorkerState:
        keeps_own = {_KEEPS_OWN: torch.ones(1)} if self._keeps_own else {}
        state = replace(self._work.add_to(debt), residual=self._gradient_debt.left, group=self._reducer.state() | keeps_own)
        if self._reducer.residual is not None:
            state = replace(state, unsent=self._shared(self._reducer.residual))
        if self._work.begun:  # local steps that an exchange has not begun to send
            state = state.plus(WorkerState(unsent=self._shared(self._local_change() * self._reducer.rate)))
        return state

    def _shared(self, vector: Tensor) -> Tensor:
        """What a residual or a message of this rank adds to the parameters. A share is in fp64, so that it is exact."""
        return vector if self._share == 1.0 else vector.double() * self._share

    def _local_change(self) -> Tensor:
        """The change by the local steps of this series."""
        return subtract(self._flat.parameters, self.received, out=torch.empty_like(self.received))

    @torch.no_grad()
    def rescue(self) -> tuple[WorkerState, WorkerState]:
        """See `Strategy.rescue`: the second part is the change that is being exchanged, with the debt that it includes."""
        change = self._change_in_flight()
        if change is None:
            return self.state().of_survivor(), WorkerState()
        # What the exchange would have added to the parameters: the part of the change that its message contained, and the debt.
        sent = self._reducer.unapplied
        doubtful = WorkerState(unsent=self._shared(change * self._reducer.rate if sent is None else sent))
        if not self._debt_included:
            return self.state().of_survivor(), doubtful
        return self._state(replace(self._debt, unsent=None)).of_survivor(), doubtful.plus(WorkerState(unsent=self._debt.unsent))

    def _change_in_flight(self) -> Tensor | None:
        """What an exchange that has been interrupted exchanged, without the debt."""
        return self._local_change() if self._in_flight else None

    def load(self, state: WorkerState) -> None:
        super().load(state)
        self._gradient_debt, self._debt.residual = Debt(self._debt.residual), None
        self._work.load(state, self.optimizer.updates)
        self._reducer.load(state.group)
        residual = self._reducer.residual
        if residual is not None:  # the reducer adds it, so the next change does not include it
            self._debt.unsent = None
            residual.zero_()
            if state.unsent is not None:
                residual.copy_(state.unsent.double() / self._share)
        self._continues = self._keeps_own and _KEEPS_OWN in state.group


class OverlappedLocalSGD(LocalSGD):
    """Local steps continue while the changes by earlier ones are exchanged (see `ChangesInFlight`).

    The result of an exchange is applied a fixed number of steps later, so replicas stay equal.
    """

    max_in_flight = 1

    def __init__(self, context: BuildContext, settings: ReplicasPlan) -> None:
        super().__init__(context, settings)
        self._delay, self._changes = settings.local.delay, ChangesInFlight(context, self._reduce)
        self._result_taken = True  # whether no step was attempted since a result was taken

    @property
    def mid_series(self) -> bool:
        """Rank 0 decides only after a result, when all workers have made as many exchanges."""
        return not self._result_taken

    def step(self) -> bool:
        self._result_taken = False
        return super().step()

    def skip(self) -> bool:
        self._result_taken = False
        return super().skip()

    def _advance(self) -> bool:
        self._work.count()
        due = self._changes.under_way and self._work.since >= self._delay
        if due:
            self._take()
        if self._work.since >= self._every and not self._changes.under_way:
            self._give()
        return due

    def _give(self) -> None:
        since, weight = self._work.take()
        self._changes.give(weight)
        self.steps[since] += 1

    def _take(self) -> None:
        """Apply the result of the exchange. If it raises NotFinite, all unsent changes are dropped."""
        self._result_taken = True
        try:
            self._changes.take(self.received, self._apply)
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

    def _continue_from_received(self) -> None:
        super()._continue_from_received()
        self._changes.begin_at(self.received)

    def _local_change(self) -> Tensor:
        return self._changes.unsent()

    def _change_in_flight(self) -> Tensor | None:
        return self._changes.sent(self.received) if self._changes.under_way else None
