"""A worker's own optimizer, where finished updates are exchanged instead of gradients."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from nmt_train.optim.config import OptimizerConfig
from nmt_train.optim.flat_model import subtract
from nmt_train.optim.optimizer import Optimizer


class WorkerOptimizer:
    """Computes updates from given parameters."""

    def __init__(self, config: OptimizerConfig, parameters: Tensor) -> None:
        self._scratch = parameters.clone()
        self.optimizer = Optimizer(dataclasses.replace(config, smoothing=0.0), self._scratch)

    def step(self, gradient: Tensor, start: Tensor) -> None:
        """Replace `gradient` by the update that it causes at the parameters `start`."""
        self._scratch.copy_(start)
        self.optimizer.apply(gradient)
        subtract(self._scratch, start, out=gradient)
