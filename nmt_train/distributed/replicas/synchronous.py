"""Synchronous data parallelism: all ranks sum their gradients, then update their replicas alike (Arnold 2016, Algorithm 1)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nmt_train.distributed.context import BuildContext
from nmt_train.distributed.plan import ReplicasPlan
from nmt_train.distributed.replica_check import compare
from nmt_train.distributed.replicas.reducer import Reduction
from nmt_train.distributed.replicas.reducers import REDUCERS
from nmt_train.distributed.state import WorkerState
from nmt_train.distributed.strategy import Strategy
from nmt_train.optim.optimizer import Optimizer, clip


class Synchronous(Strategy):
    """Each rank holds all parameters and the whole optimizer state; checkpoints save those of rank 0."""

    def __init__(self, context: BuildContext, settings: ReplicasPlan) -> None:
        parameters = context.flat.parameters
        whole = slice(0, parameters.numel())
        self._reducer = REDUCERS[settings.reducer].build(context, settings)
        super().__init__(context, Optimizer(context.plan.optimizer, parameters), [whole] * context.transport.size)
        self._sums, self._transport = context.plan.sums, context.transport

    def _exchange(self) -> None:
        gradient, (_, weight) = self._flat.gradient, self._prepare()
        with self._trace.span("sync"):
            joined = self._reducer.reduce(gradient, self.updates, weight)
        self._apply(gradient, joined)

    def _prepare(self) -> tuple[float, int]:
        """Make the flat gradient the mean of its batches, plus what is owed; returns divisor and weight (0 without a batch)."""
        divisor, weight = self.accumulator.take()
        if divisor != 1.0:
            self._flat.gradient.div_(divisor)
        self._add_residual(self._flat.gradient, weight)
        return divisor, weight

    @torch.no_grad()
    def _apply(self, gradient: Tensor, joined: Reduction) -> None:
        """Update by the sum of all gradients. Raises NotFinite, on all ranks alike, if it contains infinities or NaN."""
        self.gradient_norm = clip(gradient, self._clip_norm, joined.divisor)
        if self._sums and joined.weight > 1:
            gradient.mul_(joined.weight)
        with self._trace.span("update", self.optimizer.cost_elements):
            self.optimizer.apply(gradient)

    def refresh(self) -> None:
        compare(self._transport, self.optimizer.parameters)

    def state(self) -> WorkerState:
        residual = self._reducer.residual
        return replace(self._owed, residual=self._owed.residual if residual is None else residual, group=self._reducer.state())

    def owed(self) -> tuple[WorkerState, WorkerState]:
        kept, doubtful = super().owed()
        if self._reducer.late_residual:  # it has not changed yet if the last sum is not complete on this rank
            return replace(kept, residual=None), WorkerState(residual=kept.residual)
        return kept, doubtful

    def load(self, state: WorkerState) -> None:
        super().load(state)
        self._reducer.load(state.group)
        residual = self._reducer.residual
        if residual is not None:  # the reducer adds it, so the next gradient does not include it
            residual.zero_()
            if self._owed.residual is not None:
                residual.copy_(self._owed.residual)
                self._owed.residual = None
