"""Training on one rank, which holds all parameters (thesis 3.1)."""

from __future__ import annotations

from nmt_train.optim.optimizer import Optimizer
from nmt_train.strategy.context import BuildContext
from nmt_train.strategy.strategy import Strategy


class Alone(Strategy):
    def __init__(self, context: BuildContext) -> None:
        parameters = context.flat.parameters
        optimizer = Optimizer(context.plan.optimizer, parameters, context.flat.matrices())
        super().__init__(context, optimizer, [slice(0, parameters.numel())])

    def _exchange(self) -> None:
        """Update in place: nothing is sent."""
        gradient = self._flat.gradient
        self.gradient_norm, weight = self.accumulator.join(gradient, self._clipping)
        self._add_debt(gradient, weight)
        with self._trace.span("update", self.optimizer.cost_elements):
            self.optimizer.apply(gradient)

    def refresh(self) -> None:
        """Nothing to do: the model's parameters are the global ones."""
