"""Optimizers for finished updates: how shards and replicas apply the updates that workers computed from gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nmt_train.optim.config import OptimizerConfig
from nmt_train.optim.optimizer import Optimizer

OUTER = "outer."  # name prefix of the vectors of an outer optimizer


class UpdateOptimizer(Optimizer):
    """Applies finished updates of workers; `learning_rate` is that of the workers' own optimizers.

    outer: the names of its vectors, without their prefix.
    """

    adds_updates = True
    outer: tuple[str, ...] = ()

    def load(self, vectors: Mapping[str, Tensor], numbers: Mapping[str, Any], where: str) -> None:
        """Continue from the given state; with outer vectors of zeros if another mode saved it."""
        kept = {name: vector for name, vector in vectors.items() if not name.startswith(OUTER)}
        if numbers["updates"]:
            kept |= {OUTER + name: vectors.get(OUTER + name, torch.zeros_like(self.parameters)) for name in self.outer}
        super().load(kept, numbers, where)


class UpdateAdder(UpdateOptimizer):
    """Adds finished updates to the parameters."""

    def __init__(self, config: OptimizerConfig, parameters: Tensor) -> None:
        super().__init__(dataclasses.replace(config, name="sgd"), parameters)

    @property
    def cost_elements(self) -> int:
        return self._parameter.numel() * 3 // 7  # it reads or writes three vectors; Adam, seven

    def _step_size(self) -> float:
        return -1.0  # plain gradient descent subtracts


class OuterOptimizer(UpdateOptimizer):
    """Uses finished updates as gradients for its own steps with Nesterov momentum (DiLoCo, Douillard et al. 2023)."""

    def __init__(self, config: OptimizerConfig, parameters: Tensor, rate: float, momentum: float) -> None:
        super().__init__(dataclasses.replace(config, name="nesterov", momentum=momentum), parameters)
        self._rate = rate
        if momentum:
            self.outer = ("momentum_buffer",)

    def _step_size(self) -> float:
        return self._rate

    def apply(self, gradient: Tensor, share: float = 1.0) -> None:
        super().apply(gradient.neg_(), share)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        vectors, numbers = super().state()
        return {OUTER + name: vector for name, vector in vectors.items()}, numbers


class DelayedOuterOptimizer(UpdateAdder):
    """An outer optimizer for updates that arrive one by one (Liu et al. 2024, Async Local-SGD, Algorithm 3 with c = 0).

    Each update is applied at once, as its share of a mean over `arrivals` updates. The momentum changes, and is applied, only
    with every `arrivals`-th update: applied with each one, it would act once per worker in the same direction.
    """

    outer = ("momentum", "arrived")

    def __init__(self, config: OptimizerConfig, parameters: Tensor, rate: float, momentum: float, arrivals: int) -> None:
        super().__init__(config, parameters)
        self._rate, self._decay, self._arrivals = rate, momentum, arrivals
        self._momentum, self._arrived = torch.zeros_like(parameters), torch.zeros_like(parameters)

    @property
    def cost_elements(self) -> int:
        return self._parameter.numel() * 5 // 7  # it reads or writes five vectors; Adam, seven

    @torch.no_grad()
    def apply(self, gradient: Tensor, share: float = 1.0) -> None:
        gradient.mul_(share / self._arrivals)
        self._arrived.add_(gradient)
        if (self.updates + 1) % self._arrivals == 0:
            self._momentum.mul_(self._decay).add_(self._arrived)
            self._arrived.zero_()
            gradient.add_(self._momentum, alpha=self._decay)
        super().apply(gradient, self._rate)

    def _state(self) -> dict[str, Tensor]:
        return {OUTER + "momentum": self._momentum, OUTER + "arrived": self._arrived}


def update_optimizer(
    outer: str, rate: float, momentum: float, config: OptimizerConfig, parameters: Tensor, arrivals: int = 0
) -> Optimizer:
    """The optimizer of finished updates.

    outer: see `LocalConfig`. rate, momentum: of an outer optimizer. arrivals: how many updates all workers send in one round,
    if they arrive one by one; 0: each update is already the mean or sum of a round.
    """
    if outer == "nesterov" and arrivals:
        return DelayedOuterOptimizer(config, parameters, rate, momentum, arrivals)
    if outer == "nesterov":
        return OuterOptimizer(config, parameters, rate, momentum)
    return UpdateAdder(config, parameters)
