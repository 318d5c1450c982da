"""Exchange while computing, all workers in step: Pipe-SGD (Li et al. 2018, Algorithm 1).

The gradient of a step is on its way to the other workers while the next steps are computed, and its mean is applied a fixed
number of steps later: with width 2 that of step t - 1 at step t. `Overlap` exchanges whenever the channel is free; here what is
applied when does not depend on how fast anything is, so that replicas stay equal to the bit.
"""

from __future__ import annotations

from pydantic import Field
from pydantic.dataclasses import dataclass

from nmt_train.common.section import STRICT
from nmt_train.distributed.context import BuildContext
from nmt_train.distributed.exchange.all_reduce import AllReduce
from nmt_train.distributed.exchange.exchange import Exchange
from nmt_train.distributed.schedule.background import BackgroundTask
from nmt_train.distributed.schedule.schedule import Schedule
from nmt_train.distributed.transport import Transport
from nmt_train.optim.flat_model import FlatModel
from nmt_train.trace import Trace


@dataclass(frozen=True, config=STRICT)
class PipelineConfig:
    """Exchanging while the next batches are computed, all workers in step (Pipe-SGD)."""

    width: int = Field(
        default=2,
        ge=1,
        le=1000,
        description="pipeline width K: a gradient is applied K - 1 steps later; 1: no pipeline [steps]",
    )
    warmup: int = Field(default=0, ge=0, le=10**9, description="updates without a pipeline at the start of training [updates]")


class PipeSGD(Schedule):
    """While a batch is computed, the sums of the `width` - 1 batches before it are under way."""

    works_with = AllReduce
    in_lockstep = True

    @classmethod
    def build(cls, context: BuildContext, exchange: Exchange) -> PipeSGD:
        assert isinstance(exchange, AllReduce), "others are refused"
        return cls(context.flat, exchange, context.transport, context.trace, context.settings.pipeline, context.sums)

    def __init__(
        self,
        flat: FlatModel,
        exchange: AllReduce,
        transport: Transport,
        trace: Trace,
        config: PipelineConfig,
        sums: bool = False,
    ) -> None:
        super().__init__(exchange, flat.parameters, sums)
        self.max_in_flight = config.width - 1
        self._all_reduce = exchange  # with both of its halves
        self._flat, self._trace, self._config = flat, trace, config
        self._free = [flat.gradient.clone() for _ in range(config.width)]
        self._background = BackgroundTask(transport, trace, exchange.transfer)

    def step(self) -> bool:
        """NotFinite if the sum that is now applied is not finite: on all workers alike."""
        width = 1 if self.exchange.updates < self._config.warmup else self._config.width
        if width == 1:
            self.drain()
            return self._at_once()
        self._give()  # first: the network goes on with it as soon as it has done the one before
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
        self._background.give(vector, weight)

    def _take(self) -> bool:
        """Wait for the oldest sum, and update by it."""
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

    def refresh(self) -> None:
        self.exchange.refresh(self._flat.parameters)
