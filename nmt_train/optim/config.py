"""The settings of optimizers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from nmt_train.common.section import STRICT, listed, one_of
from nmt_train.optim.torch_optimizers import OPTIMIZERS


@dataclass(frozen=True, config=STRICT)
class OptimizerConfig:
    """How gradients become updates. Where a key does not apply to the named optimizer, it has no effect."""

    name: Annotated[str, one_of(OPTIMIZERS)] | None = Field(
        default=None, description=f"{listed(OPTIMIZERS)}; null: as the mode has it (adam, but adagrad in downpour)"
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
        default=None, gt=0, description="added to denominators; null: torch's default for the optimizer"
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
