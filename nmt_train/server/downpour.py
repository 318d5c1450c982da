"""Pushes gradients and pulls parameters independently, each after its own number of steps (Dean et al. 2012)."""

from __future__ import annotations

from dataclasses import replace

import torch

from nmt_train.server.every_step import EveryStep
from nmt_train.strategy.context import BuildContext
from nmt_train.strategy.plan import ServerPlan
from nmt_train.strategy.state import WorkerState

_SINCE = "steps_since_pull"  # name in a worker's state


class Downpour(EveryStep):
    """A worker pushes every `batch.accumulate` steps, and pulls the shards' parameters every `server.pull_every` steps."""

    def __init__(self, context: BuildContext, settings: ServerPlan) -> None:
        super().__init__(context, settings)
        self._pull_every = settings.pull_every
        self._since = 0  # steps since the last pull

    def step(self) -> bool:
        self._since += 1
        try:
            return super().step()
        finally:
            if self._since >= self._pull_every:
                self._since = 0
                self._client.pull(self._flat.parameters)

    def _exchange(self) -> None:
        gradient = self._flat.gradient
        self.gradient_norm, weight = self.accumulator.join(gradient, self._clipping)
        self._client.prepare(gradient, self._flat.parameters, weight)
        self._client.push(gradient, weight)

    def refresh(self) -> None:
        self._since = 0
        super().refresh()

    def state(self) -> WorkerState:
        state = super().state()
        return replace(state, own={_SINCE: torch.tensor([self._since])})

    def load(self, state: WorkerState) -> None:
        super().load(state)
        if _SINCE in state.own:
            self._since = int(state.own[_SINCE][0])
