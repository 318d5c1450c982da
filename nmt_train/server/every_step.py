"""Workers of a sharded parameter server that exchange after every step (thesis 3.3, 3.6)."""

from __future__ import annotations

from torch import Tensor

from nmt_train.server.client import Client
from nmt_train.server.per_node import PerNode
from nmt_train.strategy.context import BuildContext
from nmt_train.strategy.plan import ServerPlan
from nmt_train.strategy.recovery_piece import RecoveryPiece
from nmt_train.strategy.state import WorkerState
from nmt_train.strategy.strategy import Strategy
from nmt_train.transport import Future


class EveryStep(Strategy):
    """received: the parameters that the client updates. Only the client changes them; the model may have others."""

    def __init__(self, context: BuildContext, settings: ServerPlan) -> None:
        self._client = (PerNode if settings.per == "node" else Client)(context, settings, self.max_in_flight)
        super().__init__(context, self._client.optimizer, self._client.shards)
        self.staleness, self.received = self._client.service.staleness, self._flat.parameters

    @property
    def updates(self) -> int:
        return self._client.updates

    @property
    def unsettled(self) -> int:
        return self.max_in_flight + self._client.unacknowledged

    def _exchange(self) -> None:
        gradient, parameters = self._flat.gradient, self._flat.parameters
        self.gradient_norm, weight = self.accumulator.join(gradient, self._clipping)
        self._client.prepare(gradient, parameters, weight)
        self._client.exchange(gradient, parameters, weight)

    def drain(self) -> None:
        super().drain()
        self._client.leave_round()

    def _continue_from_received(self) -> None:
        if self._flat.parameters is not self.received:
            self._flat.parameters.copy_(self.received)

    def refresh(self) -> None:
        self._client.refresh(self.received)
        self._continue_from_received()

    def prepare_snapshot(self) -> None:
        if self._client.keeps_received:
            self._client.prepare_snapshot()
        else:
            self.refresh()

    def resume(self) -> None:
        if not self._client.restores:
            return self.refresh()
        self._client.resume(self.received)
        self._continue_from_received()

    def copy(self) -> Future[Tensor]:
        return self._client.copy()

    def piece(self) -> RecoveryPiece:
        return self._client.piece()

    def pieces(self) -> list[RecoveryPiece]:
        return self._client.pieces()

    def state(self) -> WorkerState:
        return self._client.state(self.received)

    def load(self, state: WorkerState) -> None:
        self._client.load(state)
