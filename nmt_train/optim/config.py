"""The settings of optimizers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from nmt_train.common.duration import Duration, Updates, number_of_updates
from nmt_train.common.section import STRICT, listed, one_of
from nmt_train.optim.torch_optimizers import OPTIMIZERS

Unchanged = Literal["unchanged"]


@dataclass(frozen=True, config=STRICT)
class OptimizerConfig:
    """How gradients become updates. Keys that do not apply to the chosen optimizer have no effect."""

    name: Annotated[str, one_of(OPTIMIZERS)] | None = Field(
        default=None, description=f"{listed(OPTIMIZERS)}; null: as in the mode (adam, but adagrad in downpour)"
    )
    learning_rate: float = Field(
        default=3e-4,
        gt=0,
        description="peak of the learning-rate schedule; auto: by model.preset and the tokens of an update (docs/guide.md)",
    )
    schedule: Literal["constant", "inverse-sqrt", "step", "cosine"] = Field(
        default="inverse-sqrt", description="learning rate after the warm-up: constant, inverse-sqrt, step or cosine"
    )
    warmup: Updates = Field(
        default=4000, description="length of the linear rise from zero to learning_rate; auto: by model.preset [updates]"
    )
    async_warmup: Updates | Unchanged | None = Field(
        default=None,
        description="warmup where the updates of n workers are added up, as in asynchronous modes: a number, or unchanged"
        " (warmup itself); null: warmup times n^(2/3), divided by n if it counts a worker's own local steps, but unchanged in"
        " thesis-sparse and thesis-sparse-overlap [updates]",
    )
    step_every: Annotated[int, BeforeValidator(number_of_updates)] = Field(
        default=10_000, ge=1, le=10**9, description="schedule step: the rate is halved at this interval [updates]"
    )
    cosine_until: Duration | None = Field(
        default=None,
        description="schedule cosine: when the rate reaches minimum, as 20e, 300Mt or 50Ku; in epochs or tokens, the rate falls"
        " alike in every mode; null: stop.after",
    )
    minimum: float = Field(default=0.0, ge=0, description="schedule cosine: final learning rate")
    clip_norm: float = Field(
        default=1.0,
        ge=0,
        description="maximum Euclidean norm of a gradient, with muon without matrices; larger ones are scaled down to it; 0: no"
        " clipping",
    )
    momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum, nesterov, muon: momentum coefficient")
    beta1: float = Field(
        default=0.9, ge=0, lt=1, description="adam, adamw, muon (what is no matrix): decay of the running mean of gradients"
    )
    async_beta1: Annotated[float, Field(ge=0, lt=1)] | Unchanged | None = Field(
        default=None,
        description="adam, adamw: beta1 where the updates of n workers are added up: a number, or unchanged (beta1 itself);"
        " null: beta1 - (1 - 1/n), at least 0, because asynchrony acts as momentum (Mitliagkas et al. 2016), but unchanged in"
        " thesis-sparse and thesis-sparse-overlap",
    )
    beta2: float = Field(
        default=0.98,
        ge=0,
        lt=1,
        description="adam, adamw, muon (what is no matrix): decay of the running mean of squared gradients",
    )
    epsilon: float | None = Field(
        default=None, gt=0, description="added to denominators; null: torch's default for the optimizer"
    )
    weight_decay: float = Field(
        default=0.01,
        ge=0,
        description="adamw, and the matrices of muon: each update subtracts learning rate x weight_decay x parameters",
    )
    smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="weight of the newest parameters in the running mean that validation and translation use; 0: off",
    )
    not_finite: Literal["stop", "skip"] = Field(
        default="stop", description="if a loss or gradient is infinite or not a number: stop, or skip the batch"
    )
