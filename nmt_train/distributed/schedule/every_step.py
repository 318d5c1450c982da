"""Exchange after every step, or after every n steps, whose gradients are combined (thesis 3.1, Algorithm 1)."""

from __future__ import annotations

from nmt_train.distributed.context import BuildContext
from nmt_train.distributed.exchange.exchange import Exchange
from nmt_train.distributed.schedule.schedule import Schedule


class EveryStep(Schedule):
    """Accumulates the gradients of `accumulate` steps in the flat gradient, then exchanges them as one."""

    accumulates = in_parts = True

    def __init__(self, context: BuildContext, exchange: Exchange) -> None:
        super().__init__(context, exchange)
        self._steps, self._accumulate = 0, context.plan.accumulate

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
