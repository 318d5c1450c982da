"""Eight bits per element, scaled by the largest magnitude (Pipe-SGD, Li et al. 2018, section 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from nmt_train.codec.chunks import blocks
from nmt_train.codec.codec import Codec
from nmt_train.codec.finite import largest_magnitude
from nmt_train.common.message import Message

_LEVELS = 127


class Int8(Codec):
    """A message holds the step size between levels, and the nearest level for each element."""

    summable = True

    def encode(self, vector: Tensor, update: int) -> Message:
        largest = largest_magnitude(vector)
        level = largest / _LEVELS
        levels = torch.empty_like(vector, dtype=torch.int8)
        for place in blocks(vector):
            levels[place] = (vector[place] / level).round_() if level > 0 else 0
        return Message((), (level.reshape(1), levels))

    def encode_shape(self, vector: Tensor) -> Message:
        return Message((), (vector.new_empty(1), vector.new_empty(vector.numel(), dtype=torch.int8)))

    def decode(self, message: Message, into: Tensor) -> None:
        level, levels = _level_and_levels(message, into)
        into.copy_(levels).mul_(level.to(into))

    def add(self, message: Message, into: Tensor, scale: float = 1.0) -> None:
        level, levels = _level_and_levels(message, into)
        into.add_(levels.to(into), alpha=scale * float(level))


def _level_and_levels(message: Message, into: Tensor) -> tuple[Tensor, ...]:
    return message.vectors((torch.float32, 1), (torch.int8, into.numel()))
