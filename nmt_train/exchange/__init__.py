"""With whom a worker exchanges: the protocol that every exchange follows."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from nmt_train.optim import Optimizer


class Exchange(Protocol):
    """`optimizer` serves this rank's shard of the parameters: all of them when the worker is alone."""

    optimizer: Optimizer

    @property
    def updates(self) -> int:
        """Updates of the global parameters, as far as this rank knows."""

    def sync(self, gradient: Tensor, parameters: Tensor) -> None:
        """Give `gradient` away and bring `parameters` up to date; both flat (elements,), in place."""
