"""Four or eight bits per element, scaled by the largest magnitude of each row of a matrix.

SDP4Bit (Jia et al. 2024) scales blocks of equal length. Rows need no further setting, and have similar elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nmt_train.codec.codec import Codec
from nmt_train.codec.finite import finite
from nmt_train.common.message import Message

FOUR_BITS, EIGHT_BITS = 15, 255  # values per element: whole multiples of a row's step, as many below zero as above
_HALF = FOUR_BITS // 2


class Levels(Codec):
    """A message holds the step of each row, and the multiples of it, one or two in a byte.

    Like `LowBit`, it knows the shapes of what it encodes.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]], values: int, scratch: Tensor) -> None:
        """shapes: (rows, columns) of a vector's matrices. values: FOUR_BITS or EIGHT_BITS. scratch: not used."""
        self._shapes, self._most, self._packs = shapes, values // 2, values == FOUR_BITS
        self._rows = sum(rows for rows, _ in shapes)
        self._elements = sum(rows * columns for rows, columns in shapes)

    def encode(self, vector: Tensor, update: int) -> Message:
        levels, steps = vector.new_empty(self._elements, dtype=torch.int8), vector.new_empty(self._rows)
        for matrix, its_levels, its_steps in zip(
            self._matrices(vector), self._matrices(levels), self._by_matrix(steps), strict=True
        ):
            torch.amax(matrix.abs(), 1, out=its_steps)
            its_steps /= self._most
            its_levels.copy_((matrix / its_steps.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round_())
        finite(steps)
        return Message((), (steps, _packed(levels) if self._packs else levels))

    def encode_shape(self, vector: Tensor) -> Message:
        packed = vector.new_empty(self._bytes, dtype=self._dtype)
        return Message((), (vector.new_empty(self._rows), packed))

    def decode(self, message: Message, into: Tensor) -> None:
        steps, packed = message.vectors((torch.float32, self._rows), (self._dtype, self._bytes))
        into.copy_(_unpacked(packed)[: self._elements] if self._packs else packed)
        for matrix, its_steps in zip(self._matrices(into), self._by_matrix(steps.to(into)), strict=True):
            matrix.mul_(its_steps[:, None])

    def _matrices(self, vector: Tensor) -> list[Tensor]:
        parts = vector.split([rows * columns for rows, columns in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def _by_matrix(self, steps: Tensor) -> Sequence[Tensor]:
        return steps.split([rows for rows, _ in self._shapes])

    @property
    def _bytes(self) -> int:
        return -(-self._elements // 2) if self._packs else self._elements

    @property
    def _dtype(self) -> torch.dtype:
        return torch.uint8 if self._packs else torch.int8


def _packed(levels: Tensor) -> Tensor:
    """Two elements in a byte, the first one in the high half."""
    digits = torch.nn.functional.pad(levels + _HALF, (0, levels.numel() % 2)).view(torch.uint8).view(-1, 2)
    return (digits[:, 0] << 4) | digits[:, 1]


def _unpacked(packed: Tensor) -> Tensor:
    return torch.stack([packed >> 4, packed & 15], 1).view(-1).view(torch.int8) - _HALF
