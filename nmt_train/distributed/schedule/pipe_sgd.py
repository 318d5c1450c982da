"""Overlap of exchange and computation with all workers in lockstep: Pipe-SGD (Li et al. 2018, Algorithm 1).

The workers sum the gradient of a step while they compute the next steps, and apply its mean a fixed number of steps later: with
width 2, they apply the mean of step t - 1 at step t. `Overlap` exchanges whenever the channel is free. Here, speed does not
affect which mean is applied at which step, so replicas stay bit-identical.
"""

from __future__ import annotations

from nmt_train.distributed.background import BackgroundTask, in_one_stage
from nmt_train.distributed.context import BuildContext
from nmt_train.distributed.exchange.all_reduce import AllReduce
from nmt_train.distributed.exchange.exchange import Exchange
from nmt_train.distributed.schedule.config import PipelineConfig
from nmt_train.distributed.schedule.schedule import Schedule


class PipeSGD(Schedule):
    """While a worker computes a batch, the gradient sums of the previous `width` - 1 batches are in flight."""

    def __init__(self, context: BuildContext, exchange: Exchange) -> None:
        assert isinstance(exchange, AllReduce), "the modes with this schedule have such an exchange"
        super().__init__(context, exchange)
        self._config: PipelineConfig = context.plan.pipeline
        self.max_in_flight = self._config.width - 1
        self._all_reduce = exchange  # `sync` in two halves: `transfer` and `apply`
        self._free = [self._flat.gradient.clone() for _ in range(self._config.width)]
        self._background = BackgroundTask(context.transport, self._trace, in_one_stage(exchange.transfer))

    def step(self) -> bool:
        """Raises NotFinite, on all workers alike, if the sum that this step applies is not finite."""
        width = 1 if self.exchange.updates < self._config.warmup else self._config.width
        if width == 1:  # nothing is in flight yet
            return self._at_once()
        self._give()  # first, so that the background task can exchange it right after the previous one
        return self._take() if self._background.under_way == width else False

    def _at_once(self) -> bool:
        _, weight = self.accumulator.take()
        try:
            self.exchange.prepare(self._flat.gradient, self._flat.parameters, weight)
            self.exchange.sync(self._flat.gradient, self._flat.parameters, weight)
        finally:
            self._flat.gradient.zero_()
        self.steps[1] += 1
        return True

    def _give(self) -> None:
        _, weight = self.accumulator.take()
        self.exchange.prepare(self._flat.gradient, self._flat.parameters, weight)
        vector = self._free.pop()
        with self._trace.span("swap", vector.numel()):
            vector.copy_(self._flat.gradient)
        self._flat.gradient.zero_()
        self._background.give(vector, weight, self.exchange.updates)

    def _take(self) -> bool:
        """Wait for the oldest sum, and apply it."""
        vector, joined = self._background.take()
        try:
            self._all_reduce.apply(vector, self._flat.parameters, joined)
        finally:
            self._free.append(vector)
        self.steps[1] += 1
        return True

    def drain(self) -> None:
        while self._background.under_way:
            self._take()
