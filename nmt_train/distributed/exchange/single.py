"""One worker that is its own server: the update happens in place (thesis 3.1)."""

from __future__ import annotations

from torch import Tensor

from nmt_train.distributed.context import BuildContext
from nmt_train.distributed.exchange.exchange import Exchange
from nmt_train.optim.optimizer import Optimizer


class SingleRank(Exchange):
    section = "server"  # of several devices, it is a server
    solitary = True

    def __init__(self, context: BuildContext) -> None:
        super().__init__(Optimizer(context.plan.optimizer, context.flat.parameters))
        self._trace = context.trace
        self.initial_slices = self.snapshot_slices = [slice(0, context.flat.parameters.numel())]

    def sync(self, gradient: Tensor, parameters: Tensor, weight: int = 1) -> None:
        """Update in place: `parameters` is the vector that the optimizer was created for, so nothing needs to be copied."""
        with self._trace.span("update", gradient.numel()):
            self.optimizer.apply(gradient)

    def refresh(self, parameters: Tensor) -> None:
        """Nothing to do: `parameters` always are the global parameters."""
