"""Sends a vector's largest elements, selected by a threshold estimated on a sample (Aji & Heafield 2017; thesis 3.8)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from nmt_train.codec.codec import Codec
from nmt_train.codec.config import CodecConfigs, DroppingConfig
from nmt_train.codec.dense import Dense
from nmt_train.codec.finite import finite
from nmt_train.codec.half import from_half, to_half
from nmt_train.codec.selection import SAMPLE, Sample, exactly, reaching
from nmt_train.common.message import Message

_SPARSE, _DENSE = 1, 0
_EXCESS = 0.5  # by which share more elements than intended may be sent if the threshold is too low


class TopK(Codec):
    """Sends about the configured fraction of the elements; or all of them, without positions, if positions would cost more than
    they save. A message's first number says which format it has.
    """

    drops = True

    def __init__(self, config: DroppingConfig, dropped: float, sample: int = SAMPLE) -> None:
        """sample: number of elements from which the threshold is estimated; it is exact for shorter vectors."""
        self._config, self._dropped, self._dense = config, dropped, Dense()
        self._pack, self._unpack = _POSITIONS[config.indices]
        self._half = config.values == "fp16"
        self._sample = Sample(sample)
        # A worker's messages may be as many updates apart as there are workers. With a prime number of parts, all get a turn.
        self._parts = _prime(config.flush) if config.flush else 0

    @classmethod
    def build(cls, configs: CodecConfigs, dropped: float) -> TopK:
        return cls(configs.dropping, dropped)

    def encode(self, vector: Tensor, update: int) -> Message:
        target = self.target(vector.numel())
        if target > vector.numel() // 2:
            finite(torch.linalg.vector_norm(vector))
            return self._dense.encode(vector, update).and_numbers(_DENSE)
        positions, values = self._largest(vector, target, update)
        if self._parts:
            positions = self._with_part(update % self._parts, positions, vector)
            values = vector[positions]
        finite(values)
        exponent, values = to_half(values) if self._half else (0, values)
        return Message((_SPARSE, positions.numel(), exponent), (self._pack(positions), values))

    def encode_shape(self, vector: Tensor) -> Message:
        target = self.target(vector.numel())
        if target > vector.numel() // 2:
            return Message((_DENSE,), (vector,))
        target += vector.numel() // self._parts if self._parts else 0
        values = vector.new_empty(target, dtype=torch.float16 if self._half else None)
        # Assumes random positions: a gap takes one more byte for each full 255, which occurs with probability (1 - share)^255.
        longer = (1 - target / vector.numel()) ** 255 if target else 0.0
        each = 1 + longer / (1 - longer) if self._config.indices == "gaps" else 4.0
        return Message((_SPARSE, target, 0), (vector.new_empty(round(target * each), dtype=torch.uint8), values))

    def decode(self, message: Message, into: Tensor) -> None:
        if message.number() == _DENSE:
            self._dense.decode(message.without_numbers(1), into)
        else:
            into.zero_()
            self.add(message, into)

    def add(self, message: Message, into: Tensor, scale: float = 1.0) -> None:
        if message.number() == _DENSE:
            self._dense.add(message.without_numbers(1), into, scale)
            return
        count = message.number(1)
        packed, values = message.vectors(
            (torch.uint8, None) if self._config.indices == "gaps" else (torch.int32, count),
            (torch.float16 if self._half else torch.float32, count),
        )
        positions = self._unpack(packed)
        if positions.numel() != count or (count and not 0 <= int(positions.min()) <= int(positions.max()) < into.numel()):
            raise message.malformed(f"{positions.numel()} positions for {count} of {into.numel()} elements, or some invalid")
        values = from_half(message, 2, values, into) if self._half else values.to(into)
        into.index_add_(0, positions, values, alpha=scale)

    def target(self, elements: int) -> int:
        """The number of elements to send: at least one, unless the vector is empty."""
        return min(elements, math.ceil(elements * (1 - self._dropped) - 1e-6))

    def _largest(self, vector: Tensor, target: int, update: int) -> tuple[Tensor, Tensor]:
        """Ascending positions, and values, of about the `target` largest elements: no zeros, and at most `_EXCESS` too many."""
        if vector.numel() <= self._sample.size:
            return exactly(torch.arange(vector.numel(), device=vector.device), vector, target)
        threshold = self._sample.threshold(vector, target, update)
        if threshold > 0:
            positions, values = reaching(vector, threshold)
        else:
            positions = vector.nonzero().flatten()
            values = vector[positions]
        most = math.floor(target * (1 + _EXCESS))
        return (positions, values) if positions.numel() <= most else exactly(positions, values, target)

    def _with_part(self, part: int, positions: Tensor, vector: Tensor) -> Tensor:
        """These ascending positions, and those of all elements of a part of the vector that are not zero."""
        start, stop = (vector.numel() * number // self._parts for number in (part, part + 1))
        there = vector[start:stop].nonzero().flatten() + start
        return torch.cat([positions[positions < start], there, positions[positions >= stop]])


def _prime(least: int) -> int:
    """The smallest prime number that is not below `least`, which must be above 1."""
    return next(n for n in itertools.count(least) if all(n % divisor for divisor in range(2, math.isqrt(n) + 1)))


def pack_gaps(positions: Tensor) -> Tensor:
    """Encode ascending positions as distances of one byte each; the byte 255 adds 255 to the distance in the next byte."""
    gaps = torch.diff(positions, prepend=positions.new_zeros(1)) if positions.numel() else positions
    ends = torch.cumsum(gaps // 255 + 1, 0) - 1
    packed = torch.full((int(ends[-1]) + 1 if ends.numel() else 0,), 255, dtype=torch.uint8, device=positions.device)
    packed[ends] = (gaps % 255).to(torch.uint8)
    return packed


def unpack_gaps(packed: Tensor) -> Tensor:
    """The positions that were passed to `pack_gaps`, as int64."""
    return torch.cumsum(packed, 0, dtype=torch.int64)[packed != 255]


_POSITIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "int32": (lambda positions: positions.to(torch.int32), lambda packed: packed.to(torch.int64)),
    "gaps": (pack_gaps, unpack_gaps),
}
