"""Pushes gradients and fetches parameters independently, each after its own number of steps (Dean et al. 2012)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nmt_train.distributed.context import BuildContext
from nmt_train.distributed.exchange.exchange import Exchange
from nmt_train.distributed.exchange.worker_state import Vectors
from nmt_train.distributed.schedule.config import DownpourConfig
from nmt_train.distributed.schedule.schedule import Schedule

_SINCE = "downpour.since"  # name of the steps since the last fetch in a worker's state


class Downpour(Schedule):
    """A worker pushes the joined gradients of every `push` steps, and fetches the shards' parameters every `fetch` steps."""

    one_call = False

    def __init__(self, context: BuildContext, exchange: Exchange) -> None:
        super().__init__(context, exchange)
        self._config: DownpourConfig = context.plan.downpour
        self._piled = self._since = 0  # steps with gradients not pushed yet; steps since the last fetch

    @property
    def mid_accumulation(self) -> bool:
        return self._piled > 0

    def step(self) -> bool:
        self._piled += 1
        self._since += 1
        given = self._piled == self._config.push
        try:
            if given:
                self._give()
        finally:
            if self._since >= self._config.fetch:
                self._since = 0
                self.exchange.fetch(self._flat.parameters)
        return given

    def _give(self) -> None:
        piled, self._piled = self._piled, 0
        try:
            self.exchange.gradient_norm, weight = self.accumulator.join(self._flat.gradient, self._clip_norm)
            self.exchange.prepare(self._flat.gradient, self._flat.parameters, weight)
            self.exchange.give(self._flat.gradient, weight)
        finally:
            self._flat.gradient.zero_()
        self.steps[piled] += 1

    def drain(self) -> None:
        if self._piled:
            self._give()
        self.exchange.leave_round()

    def refresh(self) -> None:
        self._since = 0
        super().refresh()

    def own_state(self) -> Vectors:
        return {_SINCE: torch.tensor([self._since])}

    def load_worker_state(self, vectors: Mapping[str, Tensor]) -> None:
        super().load_worker_state(vectors)
        if _SINCE in vectors:
            self._since = int(vectors[_SINCE][0])
