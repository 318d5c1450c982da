"""The settings of schedules."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from nmt_train.common.section import STRICT


@dataclass(frozen=True, config=STRICT)
class OverlapConfig:
    """Exchanging while the next batches are computed (thesis 3.4, 3.7)."""

    bound: int = Field(
        default=128,
        ge=0,
        le=10**6,
        description="maximum steps between two exchanges, after which the worker waits; 0: no limit [steps]",
    )
    local_update: Literal["none", "sum", "optimizer"] | None = Field(
        default=None,
        description="updates of a worker's own parameters between exchanges: sum (one, by the gradient that it has just sent),"
        " optimizer (one at every step), none; null: as in the mode (sum, but none in thesis-sparse-overlap)",
    )


@dataclass(frozen=True, config=STRICT)
class PipelineConfig:
    """Exchanging while the next batches are computed, with all workers in lockstep (Pipe-SGD)."""

    width: int = Field(
        default=2,
        ge=1,
        le=1000,
        description="pipeline width K: a gradient is applied K - 1 steps later; 1: no pipeline [steps]",
    )
    warmup: int = Field(default=0, ge=0, le=10**9, description="updates without a pipeline at the start of training [updates]")


@dataclass(frozen=True, config=STRICT)
class LocalConfig:
    """Local steps of every worker's own optimizer between two exchanges."""

    every: int | None = Field(
        default=None,
        ge=0,
        le=10**9,
        description="local steps between two exchanges; 0: one exchange at the end; null: as in the mode [steps]",
    )
    outer: Literal["none", "sum", "nesterov", "elastic"] | None = Field(
        default=None,
        description="how worker deltas are combined: none (average; an asynchronous server adds them up), sum, nesterov (outer"
        " optimizer step, DiLoCo; with a server, its momentum changes once per round of all workers), elastic (only"
        " with a server: pull towards a center, EASGD); null: as in the mode",
    )
    delay: int | None = Field(
        default=None,
        ge=0,
        le=10**6,
        description="local steps that a worker makes while its exchange is in flight: with all-reduce and all-gather exactly"
        " this many, at most local.every; with a server at most this many, and it exchanges again as soon as it can; 0: it"
        " waits; null: as in the mode [steps]",
    )
    elastic_share: float = Field(
        default=0.1, gt=0, le=1, description="elastic: fraction of the distance that worker and center move towards each other"
    )
    outer_rate: float = Field(default=0.7, gt=0, description="nesterov: the outer learning rate")
    outer_momentum: float = Field(default=0.9, ge=0, lt=1, description="nesterov: the outer momentum")


@dataclass(frozen=True, config=STRICT)
class DownpourConfig:
    """Pushing gradients and fetching parameters independently (Dean et al. 2012)."""

    push: int = Field(default=1, ge=1, le=10**9, description="steps whose gradients are combined into one push [steps]")
    fetch: int = Field(default=1, ge=1, le=10**9, description="steps between two fetches of the parameters [steps]")
