"""Overlap of exchange and computation with all workers in lockstep: Pipe-SGD (Li et al. 2018, Algorithm 1).

The workers sum the gradient of a step while they compute the next steps, and apply its mean a fixed number of steps later: with
width 2, they apply the mean of step t - 1 at step t. `Overlap` exchanges whenever the channel is free. Here, speed does not
affect which mean is applied at which step, so replicas stay bit-identical.
"""

from __future__ import annotations

from torch import Tensor

from nmt_train.replicas.reducer import Reduction
from nmt_train.replicas.synchronous import Synchronous
from nmt_train.strategy.background import BackgroundTask, in_one_stage
from nmt_train.strategy.context import BuildContext
from nmt_train.strategy.plan import ReplicasPlan


class PipeSGD(Synchronous):
    """While a worker computes a batch, the gradient sums of the previous `width` - 1 batches are in flight."""

    def __init__(self, context: BuildContext, settings: ReplicasPlan) -> None:
        super().__init__(context, settings)
        self._pipeline, self.max_in_flight = settings.pipeline, settings.pipeline.width - 1
        self._free = [self._flat.gradient.clone() for _ in range(settings.pipeline.width)]
        self._background = BackgroundTask(context.transport, self._trace, in_one_stage(self._reduce))

    def _reduce(self, gradient: Tensor, weight: int, update: int) -> Reduction:
        with self._trace.span("sync"):
            return self._reducer.reduce(gradient, update, weight)

    def step(self) -> bool:
        """Raises NotFinite, on all workers alike, if the sum that this step applies is not finite."""
        width = 1 if self.updates < self._pipeline.warmup else self._pipeline.width
        if width == 1:  # nothing is in flight yet
            return super().step()
        self._give()  # first, so that the background task can exchange it right after the previous one
        return self._take() if self._background.under_way == width else False

    def _give(self) -> None:
        _, weight = self._prepare()
        self._pay_debt()  # the next gradient is given before this one is applied
        vector = self._free.pop()
        with self._trace.span("swap", vector.numel()):
            vector.copy_(self._flat.gradient)
        self._flat.gradient.zero_()
        self._background.give(vector, weight, self.updates)

    def _take(self) -> bool:
        """Wait for the oldest sum, and apply it."""
        vector, joined = self._background.take()
        try:
            self._apply(vector, joined)
        finally:
            self._free.append(vector)
        self.steps[1] += 1
        return True

    def drain(self) -> None:
        while self._background.under_way:
            self._take()
