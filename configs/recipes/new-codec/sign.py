"""The sign of every element, times the mean of their magnitudes (Bernstein et al. 2018)."""

from __future__ import annotations

import torch
from torch import Tensor

from nmt_train.codec.codec import Codec
from nmt_train.codec.finite import finite
from nmt_train.common.message import Message


class Sign(Codec):
    """A message holds the scale and one byte per element."""

    def encode(self, vector: Tensor, update: int) -> Message:
        scale = vector.abs().mean().reshape(1) if vector.numel() else vector.new_zeros(1)
        finite(scale)
        return Message((), (scale, vector.sign().to(torch.int8)))

    def encode_shape(self, vector: Tensor) -> Message:
        return Message((), (vector.new_empty(1), vector.new_empty(vector.numel(), dtype=torch.int8)))

    def decode(self, message: Message, into: Tensor) -> None:
        scale, signs = message.vectors((torch.float32, 1), (torch.int8, into.numel()))
        into.copy_(signs).mul_(scale.to(into))
