"""Optimisers, learning-rate schedules and exponential smoothing over a flat vector of parameters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from nmt_train.common.errors import NotFinite, UserError
from nmt_train.common.section import STRICT

Name = Literal["sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adadelta", "adam", "adamw"]


@dataclass(frozen=True, config=STRICT)
class OptimizerConfig:
    """How gradients become updates. Where a key does not apply to the named optimiser, it has no effect."""

    name: Name | None = Field(
        default=None,
        description="sgd, momentum, nesterov, adagrad, rmsprop, adadelta, adam or adamw; null: as the mode has it (adam, but"
        " adagrad in downpour)",
    )
    learning_rate: float = Field(default=3e-4, gt=0, description="the schedule's peak")
    schedule: Literal["constant", "inverse-sqrt", "step", "cosine"] = Field(
        default="inverse-sqrt", description="after warm-up: constant, inverse-sqrt, step or cosine"
    )
    warmup: int = Field(default=4000, ge=0, le=10**9, description="linear rise from zero to learning_rate [updates]")
    async_warmup: int | None = Field(
        default=None,
        ge=0,
        le=10**9,
        description="warmup where n workers update without waiting for one another; null: warmup times n^(2/3) [updates]",
    )
    step_every: int = Field(default=10_000, ge=1, le=10**9, description="step: updates between two decays [updates]")
    step_factor: float = Field(default=0.5, gt=0, le=1, description="step: what each decay multiplies the rate with")
    cosine_updates: int = Field(default=100_000, ge=1, le=10**9, description="cosine: when the rate reaches minimum [updates]")
    minimum: float = Field(default=0.0, ge=0, description="cosine: the rate at its end")
    stall_factor: float = Field(
        default=1.0, gt=0, le=1, description="what every validation without a new best multiplies the rate with; 1: nothing"
    )
    at: Literal["shard", "worker"] | None = Field(
        default=None,
        description="several ranks: who turns gradients into updates: the shards, or every worker, whose updates shards add up;"
        " null: as the mode has it (worker where gradients are dropped, else shard)",
    )
    clip_norm: float = Field(default=1.0, ge=0, description="longest gradient, by Euclidean norm; 0: any")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum, nesterov: share of the last step kept")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="adam, adamw: decay of the mean of gradients")
    async_beta1: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="adam, adamw: beta1 where n workers update without waiting for one another; null: beta1 less the momentum"
        " that their delays make, 1 - 1/n, but not below 0 (Mitliagkas et al. 2016)",
    )
    beta2: float = Field(default=0.98, ge=0, lt=1, description="adam, adamw: decay of the mean of squared gradients")
    decay: float = Field(default=0.9, ge=0, lt=1, description="rmsprop, adadelta: decay of the mean of squared gradients")
    epsilon: float | None = Field(
        default=None, gt=0, description="added to denominators; null: torch's default for the optimiser"
    )
    weight_decay: float = Field(default=0.01, ge=0, description="adamw: share of parameters x rate subtracted per update")
    smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="weight of the newest parameters, at each update of the global ones, in their running mean, which"
        " validation uses; 0: off",
    )
    not_finite: Literal["stop", "skip"] = Field(
        default="stop", description="when a loss or gradient is infinite or not a number: stop, or skip the batch"
    )


def learning_rate(config: OptimizerConfig, update: int) -> float:
    """The rate of `update` (counted from 1), before any decay on stall."""
    if update < config.warmup:
        return config.learning_rate * update / config.warmup
    past = update - config.warmup
    if config.schedule == "inverse-sqrt":
        return config.learning_rate * math.sqrt(max(config.warmup, 1) / max(update, 1))
    if config.schedule == "step":
        return config.learning_rate * config.step_factor ** (past // config.step_every)
    if config.schedule == "cosine":
        share = min(1.0, past / max(1, config.cosine_updates - config.warmup))
        low = min(config.minimum, config.learning_rate)
        return low + (config.learning_rate - low) * (1 + math.cos(math.pi * share)) / 2
    return config.learning_rate


class Optimizer:
    """Applies gradients to a flat vector (or a shard of one) in place, by one of torch's optimisers.

    `updates` counts applications; `smoothed` is the running mean of the parameters, or None. adds: what is applied are finished
    updates.
    """

    adds = False

    def __init__(self, config: OptimizerConfig, parameters: Tensor) -> None:
        self.config, self.updates = config, 0
        self._parameter = torch.nn.Parameter(parameters)
        self._torch: Any = _Still() if parameters.is_meta else _BY_NAME[config.name or "adam"](config, self._parameter)
        self._factor = 1.0
        self.smoothed = parameters.clone() if config.smoothing else None

    @property
    def learning_rate(self) -> float:
        """The rate of the last update."""
        return learning_rate(self.config, self.updates) * self._factor

    @property
    def parameters(self) -> Tensor:
        """The vector that is updated in place."""
        return self._parameter.data

    @property
    def effort(self) -> int:
        """How many elements, as Adam takes its time for them, an update goes through."""
        return self._parameter.numel()

    def follow(self, other: Optimizer, updates: int) -> None:
        """Have the learning rate of `other` after so many updates."""
        self.updates, self._factor = updates, other._factor

    @torch.no_grad()
    def apply(self, gradient: Tensor, share: float = 1.0) -> None:
        """One update by `gradient`, of the same shape as the parameters; the gradient's values may be overwritten.

        share: how much of a step it is to be.
        """
        self.updates += 1
        self._torch.param_groups[0]["lr"] = self._step_size() * share
        self._parameter.grad = gradient
        self._torch.step()
        self.smooth()

    def smooth(self, times: int = 1) -> None:
        """Take the parameters into their running mean, if there is one: once for each of the last so many updates."""
        if self.smoothed is None or not times:
            return
        # Young means forget faster, else they would remember the random start (as Marian does).
        weights = [
            max(self.config.smoothing, 9 / (update + 10)) for update in range(self.updates - times + 1, self.updates + 1)
        ]
        weight = weights[0] if times == 1 else 1 - math.prod(1 - weight for weight in weights)
        self.smoothed.lerp_(self._parameter, weight)

    def _step_size(self) -> float:
        return self.learning_rate

    def stalled(self) -> None:
        """A validation brought nothing new: decay the rate by `stall_factor`."""
        self._factor *= self.config.stall_factor

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """torch's flat vectors by name, and numbers, from which `load` continues exactly; `smoothed` is kept apart."""
        vectors = {key: value for key, value in self._state().items() if value.shape == self._parameter.shape}
        numbers = {key: float(value) for key, value in self._state().items() if key not in vectors}
        return vectors, {"updates": self.updates, "factor": self._factor, "torch": numbers}

    def everything(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What `state` gives, with the parameters and their running mean."""
        vectors, numbers = self.state()
        mean = {} if self.smoothed is None else {"smoothed": self.smoothed}
        return {"parameters": self.parameters, **vectors, **mean}, numbers

    def load(self, vectors: Mapping[str, Tensor], numbers: Mapping[str, Any], where: str) -> None:
        """Continue from what `state` gave; UserError if it belongs to another optimiser or size."""
        if numbers["updates"]:
            self._materialise()
        elif not vectors:
            self._factor = float(numbers["factor"])
            return  # some of torch's optimisers have vectors from the start on
        expected = self.state()[0]
        if expected.keys() != vectors.keys():
            names = ", ".join(sorted(vectors)) or "nothing"
            raise UserError(f"{where}: keeps {names}, which optimizer.name {self.config.name} does not; name the one it was")
        for name, vector in vectors.items():
            if vector.shape != self._parameter.shape:
                raise UserError(f"{where}: {name} has {vector.numel()} elements instead of {self._parameter.numel()}")
            expected[name].copy_(vector)
        for name, value in numbers["torch"].items():
            self._state()[name].fill_(value)
        self.updates, self._factor = int(numbers["updates"]), float(numbers["factor"])

    def anew(self, updates: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What `state` gives of one that remembers nothing, after so many updates."""
        self._materialise()
        vectors, numbers = self.state()
        return {name: torch.zeros_like(vector) for name, vector in vectors.items()}, numbers | {"updates": updates}

    def packed(self, prefix: str) -> dict[str, Tensor]:
        """Vectors and numbers of `state` as tensors by `prefix` and name; `updates` is left to the caller."""
        vectors, numbers = self.state()
        named = vectors | {name: torch.tensor([value]) for name, value in numbers["torch"].items()}
        return {prefix + name: tensor for name, tensor in named.items()}

    def unpack(self, prefix: str, tensors: Mapping[str, Tensor], where: str) -> None:
        """Continue from what `packed` gave, if that is among `tensors`."""
        packed = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        vectors = {name: vector for name, vector in packed.items() if vector.shape == self._parameter.shape}
        numbers = {name: float(value) for name, value in packed.items() if name not in vectors}
        if packed:
            self.load(vectors, {"updates": 1, "factor": self._factor, "torch": numbers}, where)

    def _state(self) -> dict[str, Tensor]:
        return {key: value for key, value in self._torch.state.get(self._parameter, {}).items() if isinstance(value, Tensor)}

    def _materialise(self) -> None:
        """Make torch allocate its lazily made state by a step that changes nothing."""
        kept = self._parameter.detach().clone()
        self._torch.param_groups[0]["lr"] = 0.0
        self._parameter.grad = torch.zeros_like(kept)
        self._torch.step()
        self._parameter.data.copy_(kept)


class _Still:
    """In the place of torch's optimiser for parameters that have a size but no values (torch's `meta` device)."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{}]
        self.state: dict[Any, Any] = {}

    def step(self) -> None:
        pass


def among(workers: int, config: OptimizerConfig) -> OptimizerConfig:
    """The settings where so many workers update without waiting for one another."""
    if workers == 1:
        return config
    beta1 = max(0.0, config.beta1 - (1 - 1 / workers)) if config.async_beta1 is None else config.async_beta1
    warmup = round(workers ** (2 / 3) * config.warmup) if config.async_warmup is None else config.async_warmup
    return dataclasses.replace(config, beta1=beta1, warmup=warmup)


def clip(gradient: Tensor, limit: float, divisor: float) -> float:
    """Divide a gradient, then shorten it to norm `limit` (0: any), both in place; returns the norm between the two.

    NotFinite if the norm is infinite or not a number; the gradient is then left as it is. One without values has norm 0.
    """
    if gradient.is_meta:
        return 0.0
    norm = float(torch.linalg.vector_norm(gradient)) / divisor
    if not math.isfinite(norm):
        raise NotFinite(f"gradient norm is {norm}")
    scale = (limit / norm if 0 < limit < norm else 1.0) / divisor
    if scale != 1.0:
        gradient.mul_(scale)
    return norm


def _epsilon(config: OptimizerConfig) -> dict[str, Any]:
    return {} if config.epsilon is None else {"eps": config.epsilon}


_Builder = Callable[[OptimizerConfig, torch.nn.Parameter], torch.optim.Optimizer]
_BY_NAME: dict[str, _Builder] = {
    "sgd": lambda c, p: torch.optim.SGD([p], lr=c.learning_rate, fused=True),
    "momentum": lambda c, p: torch.optim.SGD([p], lr=c.learning_rate, momentum=c.momentum, fused=True),
    "nesterov": lambda c, p: torch.optim.SGD([p], lr=c.learning_rate, momentum=c.momentum, nesterov=True, fused=True),
    "adagrad": lambda c, p: torch.optim.Adagrad([p], lr=c.learning_rate, fused=p.device.type == "cpu", **_epsilon(c)),
    "rmsprop": lambda c, p: torch.optim.RMSprop([p], lr=c.learning_rate, alpha=c.decay, **_epsilon(c)),
    "adadelta": lambda c, p: torch.optim.Adadelta([p], lr=c.learning_rate, rho=c.decay, **_epsilon(c)),
    "adam": lambda c, p: torch.optim.Adam([p], lr=c.learning_rate, betas=(c.beta1, c.beta2), fused=True, **_epsilon(c)),
    "adamw": lambda c, p: torch.optim.AdamW(
        [p], lr=c.learning_rate, betas=(c.beta1, c.beta2), weight_decay=c.weight_decay, fused=True, **_epsilon(c)
    ),
}
