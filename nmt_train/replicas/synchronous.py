"""Synchronous data parallelism: all ranks average their gradients, then update their replicas alike (Arnold 2016, Algorithm 1).

This is the strategy of the modes sync, powersgd and low-bit with `replicas.buckets: 1`. With more buckets, as by default,
`Bucketed` sends parts of the gradient while the backward pass computes the others, and is otherwise the same.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nmt_train.optim.optimizer import Optimizer, divide_and_clip
from nmt_train.replicas.owned_matrices import OwnedMatrices
from nmt_train.replicas.reducer import Reduction
from nmt_train.replicas.reducers import REDUCERS
from nmt_train.strategy.context import BuildContext
from nmt_train.strategy.plan import ReplicasPlan
from nmt_train.strategy.replica_check import compare
from nmt_train.strategy.state import WorkerState
from nmt_train.strategy.strategy import Strategy


class Synchronous(Strategy):
    """Each rank holds all parameters and the whole optimizer state; checkpoints save those of rank 0."""

    def __init__(self, context: BuildContext, settings: ReplicasPlan) -> None:
        parameters = context.flat.parameters
        whole = slice(0, parameters.numel())
        self._reducer = REDUCERS[settings.reducer].build(context, settings)
        optimizer = Optimizer(context.plan.optimizer, parameters, context.flat.matrices())
        super().__init__(context, optimizer, [whole] * context.transport.size)
        self._owned: OwnedMatrices | None = None  # with muon, if other ranks can get its directions
        if context.plan.optimizer.name == "muon" and self._reducer.has_owners and context.transport.size > 1:
            self._owned = OwnedMatrices(context.flat, optimizer, context.transport, context.trace)
            self._reducer.own(self._owned)
        self._sums_gradients, self._transport = context.plan.sums, context.transport

    def _exchange(self) -> None:
        gradient, (_, weight) = self._flat.gradient, self._prepare()
        with self._trace.span("sync"):
            joined = self._reducer.reduce(gradient, self.updates, weight)
        self._apply(gradient, joined)

    def _prepare(self) -> tuple[float, int]:
        """Make the flat gradient the mean of this worker's batches, plus what it owes; `Bucketed` adds the last batch later.

        Returns the divisor that made it the mean, and its weight in the mean of all workers: its target tokens, or its number
        of batches if gradients are summed; 0 without a batch.
        """
        divisor, weight = self.accumulator.take()
        if divisor != 1.0:
            self._flat.gradient.div_(divisor)
        self._add_debt(self._flat.gradient, weight)
        return divisor, weight

    @torch.no_grad()
    def _apply(self, gradient: Tensor, joined: Reduction) -> None:
        """Update by what the reducer returned. Raises NotFinite, on all ranks alike, if it contains infinities or NaN."""
        self.gradient_norm = divide_and_clip(gradient, self._clipping, joined.divisor)  # it is now the mean of all ranks
        if self._owned is not None:
            self._owned.complete()
        if self._sums_gradients and joined.weight > 1:  # batch.reduction: sum
            gradient.mul_(joined.weight)
        self._pay_debt()  # from here on, an update that this worker has made includes it
        with self._trace.span("update", self.optimizer.cost_elements):
            self.optimizer.apply(gradient)

    def refresh(self) -> None:
        """The replicas are equal already; UserError if they are not."""
        compare(self._transport, self.optimizer.parameters)

    def prepare_snapshot(self) -> None:
        super().prepare_snapshot()
        if self._owned is not None:
            self._owned.share_momenta()

    def state(self) -> WorkerState:
        residual, group = self._reducer.residual, self._reducer.state()
        if self._owned is not None:
            group |= self._owned.state()
        return replace(self._debt, residual=self._debt.residual if residual is None else residual, group=group)

    def rescue(self) -> tuple[WorkerState, WorkerState]:
        kept, doubtful = super().rescue()
        sent = self._reducer.keeps_residual_until_complete or self._debt_included
        if sent:  # perhaps, by the interrupted sum; the residual still has all
            return replace(kept, residual=None), WorkerState(residual=kept.residual)
        return kept, doubtful

    def load(self, state: WorkerState) -> None:
        super().load(state)
        self._reducer.load(state.group)
        if self._owned is not None:
            self._owned.load(state.group)
        residual = self._reducer.residual
        if residual is not None:  # the reducer adds it, so the next gradient does not include it
            residual.zero_()
            if self._debt.residual is not None:
                residual.copy_(self._debt.residual)
                self._debt.residual = None
