"""Exchange after every step, or after every n steps whose gradients are joined (thesis 3.1, Algorithm 1)."""

from __future__ import annotations

from nmt_train.distributed.context import BuildContext
from nmt_train.distributed.exchange.exchange import Exchange
from nmt_train.distributed.schedule.schedule import Schedule
from nmt_train.optim.flat_model import FlatModel


class EveryStep(Schedule):
    """Accumulates the gradients of `accumulate` steps in the flat gradient, then exchanges them as one."""

    alone = in_lockstep = accumulates = in_parts = True

    @classmethod
    def build(cls, context: BuildContext, exchange: Exchange) -> EveryStep:
        settings = context.settings
        return cls(context.flat, exchange, settings.optimizer.clip_norm, settings.batch.accumulate, context.sums)

    def __init__(self, flat: FlatModel, exchange: Exchange, clip_norm: float, accumulate: int, sums: bool = False) -> None:
        super().__init__(exchange, flat.parameters, sums)
        self._flat, self._clip_norm, self._accumulate = flat, clip_norm, accumulate
        self._steps = 0

    @property
    def mid_accumulation(self) -> bool:
        return self._steps > 0

    def step(self) -> bool:
        self._steps += 1
        if self._steps < self._accumulate:
            return False
        self._exchange()
        return True

    def _exchange(self) -> None:
        steps, self._steps = self._steps, 0
        try:
            self._give_away()
        finally:
            self._flat.gradient.zero_()
        self.steps[steps] += 1

    def _give_away(self) -> None:
        gradient, parameters = self._flat.gradient, self._flat.parameters
        if self.exchange.clips:
            divisor, weight = self.accumulator.take()
            if divisor != 1.0:
                gradient.div_(divisor)
        else:
            self.exchange.gradient_norm, weight = self.accumulator.join(gradient, self._clip_norm)
        self.exchange.prepare(gradient, parameters, weight)
        self.exchange.sync(gradient, parameters, weight)

    def drain(self) -> None:
        """Exchange an accumulated gradient of fewer than `accumulate` steps; nothing else is ever in flight."""
        if self._steps:
            self._exchange()
        self.exchange.leave_round()

    def refresh(self) -> None:
        self.exchange.refresh(self._flat.parameters)
