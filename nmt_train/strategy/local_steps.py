"""The steps that a worker makes with its own optimizer between two exchanges, in families replicas and server."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from nmt_train.optim.config import OptimizerConfig
from nmt_train.optim.flat_model import add, subtract
from nmt_train.optim.gradient_accumulation import GradientAccumulator
from nmt_train.optim.optimizer import Clipping, Optimizer
from nmt_train.optim.update_optimizers import update_optimizer
from nmt_train.strategy.background import BackgroundTask, in_one_stage
from nmt_train.strategy.context import BuildContext
from nmt_train.strategy.plan import LocalPlan
from nmt_train.strategy.state import WorkerState

T = TypeVar("T")
_TOTAL = "local_steps"  # name of `total` in a worker's state


def outer_optimizer(local: LocalPlan, config: OptimizerConfig, parameters: Tensor, arrivals: int = 0) -> Optimizer:
    """What applies the changes by local steps to the global parameters. arrivals: see `update_optimizer`."""
    return update_optimizer(local.outer, local.outer_rate, local.outer_momentum, config, parameters, arrivals)


class LocalWork:
    """total: local steps in total. since: those since the last exchange. begun: a step was attempted since, even a non-finite
    one.
    """

    def __init__(self, context: BuildContext) -> None:
        plan, self._flat, self._trace = context.plan, context.flat, context.trace
        self.accumulator = GradientAccumulator(sums=False)  # each local step is a separate update
        config = dataclasses.replace(plan.optimizer, smoothing=0.0)  # only the global parameters have a running mean
        self.optimizer = Optimizer(config, self._flat.parameters, self._flat.matrices())
        self._clipping = Clipping.of(config, self._flat.parameters.numel(), self._flat.matrices())
        self.total = self.since = 0
        self.begun = self._had_batch = False

    def step(self, followed: Optimizer, prepare: Callable[[Tensor, int], None]) -> float:
        """Update the model's parameters by the flat gradient; returns its norm. Raises NotFinite.

        followed: the optimizer whose learning rate applies. prepare: changes the gradient in place; its arguments are the
        gradient and its weight.
        """
        gradient, self.begun, self._had_batch = self._flat.gradient, True, True
        try:
            norm, weight = self.accumulator.join(gradient, self._clipping)
            prepare(gradient, weight)
            self.optimizer.follow(followed, self.total)
            with self._trace.span("update", self.optimizer.cost_elements):
                self.optimizer.apply(gradient)
            return norm
        finally:
            gradient.zero_()

    def count(self) -> None:
        """Count a step, perhaps without a batch. A non-finite step is not counted, so that all workers count alike."""
        self.begun = True
        self.total += 1
        self.since += 1

    def take(self) -> tuple[int, int]:
        """Begin a new series of steps; returns the length of the old one, and its weight in a mean: 0 without a batch."""
        taken = self.since, int(self._had_batch)
        self.since, self.begun, self._had_batch = 0, False, False
        return taken

    def add_to(self, state: WorkerState) -> WorkerState:
        """The state with the own optimizer's."""
        own = state.own | {_TOTAL: torch.tensor([self.total])}
        return dataclasses.replace(state, optimizer=self.optimizer.packed(), own=own)

    def load(self, state: WorkerState, updates: int) -> None:
        """Continue from what `add_to` returned. updates: the number of steps if another strategy has saved the state."""
        self.optimizer.unpack(state.optimizer, "the worker's optimizer")
        self.total = int(state.own[_TOTAL][0]) if _TOTAL in state.own else updates


class ChangesInFlight(Generic[T]):
    """Lets a worker make local steps while the changes by earlier ones are exchanged (CoCoD-SGD, Shen et al. 2019).

    Unsent changes begin at `_start`: the received parameters, plus the change that is in flight, if any.
    """

    def __init__(self, context: BuildContext, exchange: Callable[[Tensor, int], T]) -> None:
        """exchange: exchanges a change of a weight, in a background task; it may overwrite the change."""
        self._parameters, self._trace = context.flat.parameters, context.trace
        self._start, self._change = context.flat.parameters.clone(), context.flat.gradient.clone()
        self._background = BackgroundTask[T](context.transport, context.trace, in_one_stage(exchange))

    @property
    def under_way(self) -> bool:
        return self._background.under_way > 0

    @property
    def arrived(self) -> bool:
        """Whether `take` would not wait."""
        return self._background.ready

    @torch.no_grad()
    def give(self, weight: int) -> None:
        """Begin to exchange what has changed since the last call; nothing else may be under way."""
        with self._trace.span("swap", self._change.numel()):
            subtract(self._parameters, self._start, out=self._change)
            self._start.copy_(self._parameters)
        self._background.give(self._change, weight)

    @torch.no_grad()
    def take(self, received: Tensor, finish: Callable[[Tensor, T], None] = lambda change, result: None) -> None:
        """Wait for the exchange, and continue from `received` plus the changes that the worker has made in the meantime.

        finish: sets `received` by the exchanged vector and the result of the exchange. Raises NotFinite.
        """
        change, result = self._background.take()
        finish(change, result)
        with self._trace.span("swap", change.numel()):
            subtract(self._parameters, self._start, out=change)
            add(received, change, out=self._parameters)
            self._start.copy_(received)

    def begin_at(self, received: Tensor) -> None:
        """Drop all unsent changes: the model's parameters have been set to `received`."""
        self._start.copy_(received)

    def unsent(self) -> Tensor:
        return subtract(self._parameters, self._start, out=torch.empty_like(self._start))

    def sent(self, received: Tensor) -> Tensor:
        """The change that is under way."""
        return subtract(self._start, received, out=torch.empty_like(self._start))
