"""Workers whose own parameters are tied to a common center by an elastic force (EASGD, Zhang et al. 2015)."""

from __future__ import annotations

from dataclasses import replace

import torch

from nmt_train.common.errors import NotFinite
from nmt_train.optim.flat_model import subtract
from nmt_train.server.local_sgd import LocalSGD
from nmt_train.strategy.context import BuildContext
from nmt_train.strategy.plan import ServerPlan
from nmt_train.strategy.state import WorkerState

_OWN = "elastic_parameters"  # name of the worker's own parameters in its state


class EASGD(LocalSGD):
    """Every `local.every` steps, a worker and the center move toward each other by a share of the distance between them.

    The shards' parameters are the center. Each worker exchanges at its own pace.
    """

    def __init__(self, context: BuildContext, settings: ServerPlan) -> None:
        super().__init__(context, settings)
        self._share = settings.local.elastic_share
        self._placed = False  # whether the worker's own parameters have been set

    @torch.no_grad()
    def _exchange(self) -> None:
        since, weight = self._work.take()
        move, parameters = self._flat.gradient, self._flat.parameters
        self._client.pull(self.received)  # the center as it is now
        subtract(parameters, self.received, out=move).mul_(self._share)
        parameters.sub_(move)
        try:
            self._client.push(move, weight)
        except NotFinite:  # the move is lost: the worker begins again at the center
            parameters.copy_(self.received)
            raise
        finally:
            move.zero_()
        self.steps[since] += 1

    @property
    def unsettled(self) -> int:
        """None: if a move of the center is lost, the worker's own parameters still contain its batches."""
        return 0

    def resume(self) -> None:
        if self._placed:
            super().resume()
        else:
            self.refresh()

    def _continue_from_received(self) -> None:
        """Only a new worker: later, its own parameters stay where they are when the center changes."""
        if not self._placed:
            super()._continue_from_received()
            self._placed = True

    def state(self) -> WorkerState:
        """Includes the worker's own parameters, but no unsent change: their distance to the center remains."""
        state = self._work.add_to(self._client.state(self.received))
        return replace(state, own=state.own | {_OWN: self._flat.parameters})

    def load(self, state: WorkerState) -> None:
        super().load(state)
        self._placed = _OWN in state.own
        if self._placed:
            self._flat.parameters.copy_(state.own[_OWN])
