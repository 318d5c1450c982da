"""Workers whose own parameters are tied to a common center by an elastic force (EASGD, Zhang et al. 2015)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nmt_train.common.errors import NotFinite
from nmt_train.distributed.context import BuildContext
from nmt_train.distributed.exchange.exchange import Exchange
from nmt_train.distributed.exchange.worker_state import Vectors
from nmt_train.distributed.schedule.local_sgd import LocalSGD
from nmt_train.optim.flat_model import subtract

_OWN = "elastic.parameters"  # name of the worker's own parameters in its state


class EASGD(LocalSGD):
    """Every `local.every` steps, a worker and the center move toward each other by a share of the distance between them.

    The shards' parameters are the center. Each worker exchanges at its own pace.
    """

    one_call = False

    def __init__(self, context: BuildContext, exchange: Exchange) -> None:
        super().__init__(context, exchange)
        self._share = context.plan.local.elastic_share
        self._placed = False  # whether the worker's own parameters have been set

    @torch.no_grad()
    def _exchange(self) -> None:
        since, self._since, self._begun, weight = self._since, 0, False, self._take_worked()
        move, parameters = self._flat.gradient, self._flat.parameters
        self.exchange.fetch(self._start)  # the center as it is now
        subtract(parameters, self._start, out=move).mul_(self._share)
        parameters.sub_(move)
        try:
            self.exchange.give(move, weight)
        except NotFinite:  # the move is lost: the worker begins again at the center
            parameters.copy_(self._start)
            raise
        finally:
            move.zero_()
        self.steps[since] += 1

    @property
    def unsettled(self) -> int:
        """None: if a move of the center is lost, the worker's own parameters still contain its batches."""
        return 0

    def _start_from_received(self) -> None:
        """Only a new worker: later, its own parameters stay where they are when the center changes."""
        if not self._placed:
            super()._start_from_received()
            self._placed = True

    def own_state(self) -> Vectors:
        return super().own_state() | {_OWN: self._flat.parameters}

    def rescued(self) -> Vectors:
        """Includes the worker's own parameters, but no unsent delta: their distance to the center remains."""
        return self.exchange.rescued() | self.own_state()

    def load_worker_state(self, vectors: Mapping[str, Tensor]) -> None:
        super().load_worker_state(vectors)
        self._placed = _OWN in vectors
        self._restored = self._restored and self._placed
        if self._placed:
            self._flat.parameters.copy_(vectors[_OWN])
