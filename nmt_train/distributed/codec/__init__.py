"""What travels: what every codec does, and its settings."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal, Protocol

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from nmt_train.common.section import STRICT
from nmt_train.distributed.message import Message


class Codec(Protocol):
    """Turns a vector into a message and back. What a message leaves out of a vector is the codec's loss.

    biased: on the mean, something is left out, so that error feedback is needed. A codec that is right on the mean must have
    none: its error may be larger than the vector, and feedback would multiply it from message to message.
    """

    biased: bool = True

    @abstractmethod
    def encode(self, vector: Tensor, update: int) -> Message:
        """`vector` (elements,) as it is; `update` is how many updates there were, for what changes over training.

        NotFinite if what would be sent is infinite or not a number.
        """

    @abstractmethod
    def sized(self, vector: Tensor) -> Message:
        """A message as long as `encode` makes in the end, of a vector that has a size but no values (torch's `meta` device)."""

    def effort(self, elements: int) -> int:
        """How many of a vector's elements encoding goes through: none where the vector itself is sent."""
        return elements

    @abstractmethod
    def decode(self, message: Message, into: Tensor) -> None:
        """Overwrite `into` (elements,) with the vector that the message stands for."""

    @abstractmethod
    def add(self, message: Message, into: Tensor, scale: float = 1.0) -> None:
        """Add `scale` times that vector instead."""


class SizeOnly(Codec):
    """Any codec for vectors that have a size but no values: messages have their lengths, and there is nothing to decode."""

    def __init__(self, codec: Codec) -> None:
        self._codec, self.biased = codec, codec.biased

    def encode(self, vector: Tensor, update: int) -> Message:
        return self._codec.sized(vector)

    def sized(self, vector: Tensor) -> Message:
        return self._codec.sized(vector)

    def effort(self, elements: int) -> int:
        return self._codec.effort(elements)

    def decode(self, message: Message, into: Tensor) -> None:
        return None

    def add(self, message: Message, into: Tensor, scale: float = 1.0) -> None:
        return None


@dataclass(frozen=True, config=STRICT)
class DroppingConfig:
    """Gradient dropping (Aji & Heafield 2017; thesis 3.8): only the largest elements travel, the rest waits for its turn."""

    up: float = Field(default=0.99, ge=0, lt=1, description="share of a worker's gradient that is not sent")
    down: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="share of a shard's delta that is not sent; null: so much that what all other workers send gets through",
    )
    sample: int = Field(
        default=10_000, ge=100, le=10**9, description="elements from which the threshold is estimated; it is exact for fewer"
    )
    excess: float = Field(
        default=0.5, ge=0, le=100, description="most that may be sent beyond the target, as a share of it, when the sample errs"
    )
    values: Literal["fp32", "fp16"] = Field(default="fp16", description="precision of what is sent; the rounding waits too")
    indices: Literal["int32", "gaps"] = Field(
        default="gaps", description="positions of what is sent: 4 bytes each, or distances of 1 byte and more"
    )
    warmup: Literal["none", "dense", "exponential"] = Field(
        default="none",
        description="begin by sending all: dense: for warmup_updates; exponential: the share falls to its target over them",
    )
    warmup_updates: int = Field(default=200, ge=0, le=10**9, description="length of the warm-up [updates]")


@dataclass(frozen=True, config=STRICT)
class ThresholdConfig:
    """Sending only what has grown to a threshold, as plus or minus the threshold (Strom 2015)."""

    tau: float | None = Field(
        default=None, gt=0, le=100, description="the threshold; null: what about a share of `density` reaches"
    )
    density: float = Field(default=0.01, gt=0, le=0.5, description="share of a vector that is sent, where tau is null")
    sample: int = Field(default=10_000, ge=100, le=10**9, description="elements from which tau is estimated, where it is null")
    coding: Literal["words", "golomb-rice"] = Field(
        default="golomb-rice", description="of positions and signs: words of 4 bytes, or gaps in Golomb's and Rice's code"
    )


@dataclass(frozen=True, config=STRICT)
class LowRankConfig:
    """Sending matrices as products of two thin ones (PowerSGD, Vogels et al. 2019)."""

    rank: int = Field(default=1, ge=1, le=1024, description="columns of each factor")


@dataclass(frozen=True, config=STRICT)
class QsgdConfig:
    """Random rounding to a few levels, right on average (Alistarh et al. 2017)."""

    levels: int = Field(default=15, ge=1, le=127, description="levels above zero, up to the norm of a stretch")
    bucket: int = Field(default=128, ge=1, le=10**9, description="elements that share a norm")
    coding: Literal["plain", "elias"] = Field(
        default="elias", description="of levels: all in as many bits as the highest, or in Elias's gamma code"
    )


def dropped_down(config: DroppingConfig, pushes: int) -> float:
    """The share of a delta that is left out where, by each, so many workers' pushes are news to the one that gets it."""
    if config.down is not None:
        return config.down
    return max(0.0, 1 - max(1, pushes) * (1 - config.up))


def kept(config: DroppingConfig, dropped: float, update: int) -> float:
    """The share of a vector that is sent at `update` when `dropped` is the share left out after the warm-up."""
    if config.warmup == "none" or update >= config.warmup_updates:
        return 1 - dropped
    if config.warmup == "dense":
        return 1.0
    return float((1 - dropped) ** (update / config.warmup_updates))
