"""Giving gradients away and fetching parameters each every so many steps, on their own (Dean et al. 2012)."""

from __future__ import annotations

from nmt_train.exchange import Exchange
from nmt_train.flat import Flat
from nmt_train.optim import clip
from nmt_train.schedule import DownpourConfig, Schedule


class Downpour(Schedule):
    """The mean of `push` steps' gradients is given away; every `fetch` steps a worker takes the shards' parameters over."""

    def __init__(self, flat: Flat, exchange: Exchange, config: DownpourConfig, clip_norm: float) -> None:
        super().__init__(exchange)
        self._flat, self._config, self._clip_norm = flat, config, clip_norm
        self._piled = self._since = 0  # steps whose gradients are not given away; steps since the last fetch

    @property
    def between(self) -> bool:
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
            self.exchange.gradient_norm = clip(self._flat.gradient, self._clip_norm, piled)
            self.exchange.prepare(self._flat.gradient, self._flat.parameters)
            self.exchange.give(self._flat.gradient)
        finally:
            self._flat.gradient.zero_()
        self.steps[piled] += 1

    def drain(self) -> None:
        if self._piled:
            self._give()
        self.exchange.rest()

    def refresh(self) -> None:
        self._since = 0
        self.exchange.refresh(self._flat.parameters)
