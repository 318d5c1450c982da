"""The settings of codecs."""

from __future__ import annotations

import dataclasses
from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from nmt_train.common.section import STRICT


@dataclass(frozen=True, config=STRICT)
class DroppingConfig:
    """Gradient dropping (Aji & Heafield 2017; thesis 3.8): only the elements of largest magnitude are sent; the rest stays in
    the residual.
    """

    up: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="fraction of a worker's gradient that is not sent; null: as in the mode (0.99, but 0.999 in thesis-sparse"
        " and thesis-sparse-overlap)",
    )
    down: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="fraction of a shard's delta that is not sent; null: chosen so that the pushes of all other workers"
        " get through (0.999 in thesis-sparse and thesis-sparse-overlap)",
    )
    values: Literal["fp32", "fp16"] = Field(
        default="fp16", description="precision of sent values; rounding errors are kept in the residual"
    )
    indices: Literal["int32", "gaps"] = Field(
        default="gaps", description="encoding of positions: int32 (4 bytes), or gaps (distances of 1 byte or more)"
    )
    flush: int | None = Field(
        default=None,
        ge=100,
        le=10**6,
        description="number of parts of the vector (rounded up to a prime number) of which every message also contains one in"
        " full, in turn, so that no element waits forever; null: no part [parts]",
    )


@dataclass(frozen=True, config=STRICT)
class ThresholdConfig:
    """Sending elements that reach a threshold, as plus or minus the threshold (Strom 2015)."""

    tau: float | None = Field(
        default=None,
        gt=0,
        le=100,
        description="threshold; null: chosen so that about a fraction of `density` of the elements reaches it",
    )
    density: float = Field(default=0.01, gt=0, le=0.5, description="fraction of elements that is sent, if tau is null")
    coding: Literal["words", "golomb-rice"] = Field(
        default="golomb-rice", description="encoding of positions and signs: words (4 bytes), or golomb-rice (codes of gaps)"
    )


@dataclass(frozen=True, config=STRICT)
class TileConfig:
    """Sending the largest elements of every tile of consecutive elements (codec tile-top-k, SparseLoCo)."""

    size: int = Field(
        default=4096,
        ge=64,
        le=2**20,
        description="number of elements of a tile; of large tiles, more of what is sent is where most has changed [elements]",
    )
    keep: int = Field(
        default=64, ge=1, le=2**20, description="number of elements sent of each tile, at most its size [elements]"
    )
    decay: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="mode sparse-local: before every exchange, the residual is multiplied by this",
    )
    rate: float = Field(
        default=1.0, gt=0, description="mode sparse-local: what workers send is multiplied by this (the outer learning rate)"
    )


@dataclasses.dataclass(frozen=True)
class CodecConfigs:
    """The settings of all codecs; each codec uses its own."""

    dropping: DroppingConfig
    threshold: ThresholdConfig
    tiles: TileConfig
