"""One worker that is its own server: the update happens in place (thesis 3.1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import Tensor

from nmt_train.exchange import RESIDUAL, Vectors
from nmt_train.optim import Optimizer
from nmt_train.trace import Trace


class Alone:
    at_worker = False

    def __init__(self, optimizer: Optimizer, trace: Trace) -> None:
        self.optimizer, self._trace = optimizer, trace
        self.staleness = Counter[int]()
        self._owed: Tensor | None = None  # what another mode had not sent yet

    @property
    def updates(self) -> int:
        return self.optimizer.updates

    def prepare(self, gradient: Tensor, parameters: Tensor) -> None:
        """The gradient is what is given."""

    def sync(self, gradient: Tensor, parameters: Tensor) -> None:
        """`parameters` is the vector that the optimiser was made for, so it is up to date as soon as it is updated."""
        if self._owed is not None:
            gradient.add_(self._owed)
            self._owed = None
        with self._trace.span("update", gradient.numel()):
            self.optimizer.apply(gradient)

    def rest(self) -> None:
        """Nobody waits."""

    def refresh(self, parameters: Tensor) -> None:
        """They always are the global ones."""

    def carried(self) -> Vectors:
        return {} if self._owed is None else {RESIDUAL: self._owed}

    def carry(self, vectors: Mapping[str, Tensor]) -> None:
        owed = vectors.get(RESIDUAL)
        self._owed = None if owed is None else owed.to(self.optimizer.parameters)
