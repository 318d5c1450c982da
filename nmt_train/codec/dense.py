"""All elements of a vector, in full precision or as bf16."""

from __future__ import annotations

import torch
from torch import Tensor

from nmt_train.codec.chunks import blocks
from nmt_train.codec.codec import Codec
from nmt_train.codec.finite import finite
from nmt_train.common.message import Message


class Dense(Codec):
    """fp32: a message holds the vector itself, not a copy."""

    lossless = summable = True

    def encode(self, vector: Tensor, update: int) -> Message:
        return Message((), (vector,))

    def encode_shape(self, vector: Tensor) -> Message:
        return Message((), (vector,))

    def cost_elements(self, elements: int) -> int:
        return 0

    def decode(self, message: Message, into: Tensor) -> None:
        into.copy_(message.vector(into.numel()))

    def add(self, message: Message, into: Tensor, scale: float = 1.0) -> None:
        into.add_(message.vector(into.numel()).to(into), alpha=scale)


class BFloat16(Codec):
    """Each element rounded to bf16, which has the range of fp32."""

    summable = True

    def encode(self, vector: Tensor, update: int) -> Message:
        finite(torch.linalg.vector_norm(vector))
        rounded = torch.empty_like(vector, dtype=torch.bfloat16)
        for place in blocks(vector):
            rounded[place] = self._rounded(vector[place])
        return Message((), (rounded,))

    def _rounded(self, block: Tensor) -> Tensor:
        largest = torch.finfo(torch.bfloat16).max
        return block.clamp(-largest, largest)

    def encode_shape(self, vector: Tensor) -> Message:
        return Message((), (vector.to(torch.bfloat16),))

    def decode(self, message: Message, into: Tensor) -> None:
        into.copy_(message.vector(into.numel(), torch.bfloat16))

    def add(self, message: Message, into: Tensor, scale: float = 1.0) -> None:
        into.add_(message.vector(into.numel(), torch.bfloat16).to(into), alpha=scale)


class Truncated(BFloat16):
    """The upper 16 bits of each fp32 element: the lower bits of the mantissa are dropped, not rounded (Pipe-SGD, 3.2)."""

    def _rounded(self, block: Tensor) -> Tensor:
        return (block.float().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
