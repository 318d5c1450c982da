"""A worker's own optimizer, for modes that exchange finished updates instead of gradients."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from nmt_train.optim.config import OptimizerConfig
from nmt_train.optim.flat_model import FlatModel, subtract
from nmt_train.optim.optimizer import Optimizer
from nmt_train.trace import Trace


class WorkerOptimizer:
    """Turns gradients into updates of given parameters, without changing these parameters."""

    def __init__(self, config: OptimizerConfig, flat: FlatModel, followed: Optimizer, trace: Trace) -> None:
        """followed: the optimizer of the global parameters, whose learning rate this one uses."""
        self._followed, self._trace, self._scratch = followed, trace, flat.parameters.clone()
        self.optimizer = Optimizer(dataclasses.replace(config, smoothing=0.0), self._scratch, flat.matrices())

    def step(self, gradient: Tensor, start: Tensor, updates: int) -> None:
        """Replace `gradient` by the update that it causes at `start`, the parameters after `updates` updates."""
        with self._trace.span("update", self.optimizer.cost_elements):
            self.optimizer.follow(self._followed, updates)
            self._scratch.copy_(start)
            self.optimizer.apply(gradient)
            subtract(self._scratch, start, out=gradient)
