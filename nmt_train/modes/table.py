"""A row of the table of modes, and the configuration's section that replaces single choices of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from nmt_train.common.section import STRICT

CodecName = Literal["dense", "half", "bf16", "int8", "onebit", "qsgd", "threshold", "top-k", "low-rank"]


@dataclass(frozen=True, config=STRICT)
class OverrideConfig:
    """Choices that replace those of the mode's row; null: as the mode has it."""

    schedule: Literal["every-step", "overlapped", "pipelined", "local-steps", "downpour"] | None = Field(
        default=None, description="when: every-step, overlapped, pipelined, local-steps or downpour"
    )
    exchange: Literal["alone", "server", "all-reduce", "peers"] | None = Field(
        default=None, description="with whom: alone, server, all-reduce or peers"
    )
    up: CodecName | None = Field(
        default=None, description="what workers send: dense, half, bf16, int8, onebit, qsgd, threshold, top-k or low-rank"
    )
    down: CodecName | None = Field(default=None, description="what shards send: the same")


@dataclasses.dataclass(frozen=True)
class Mode:
    """One row. nodes: most machines (0: any); workers: how many exchange without waiting for one another, as `check` finds;
    settings: what keys that the config leaves to the mode are (null there).

    optimizer: where gradients become updates. Adam's averages starve on a shard that gets a hundredth of a gradient at a time,
    so that sparse modes drop updates that workers have made of their dense gradients (docs/experiments.md).
    """

    schedule: str
    exchange: str
    up: str
    down: str
    source: str
    optimizer: str = "shard"
    nodes: int = 0
    workers: int = 1
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def in_buckets(self) -> bool:
        """Whether parts of a gradient may travel apart; low rank needs whole matrices."""
        return self.schedule == "every-step" and self.exchange == "all-reduce" and self.up != "low-rank"
