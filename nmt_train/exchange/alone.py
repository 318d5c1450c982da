"""One worker that is its own server: the update happens in place (thesis 3.1)."""

from __future__ import annotations

from torch import Tensor

from nmt_train.optim import Optimizer


class Alone:
    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def updates(self) -> int:
        return self.optimizer.updates

    def sync(self, gradient: Tensor, parameters: Tensor) -> None:
        """`parameters` is the vector that the optimiser was made for, so it is up to date as soon as it is updated."""
        self.optimizer.apply(gradient)
