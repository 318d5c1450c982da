"""All of a vector, in full or half precision."""

from __future__ import annotations

import torch
from torch import Tensor

from nmt_train.common.errors import NotFinite
from nmt_train.distributed.codec import Codec
from nmt_train.distributed.codec.chunks import blocks
from nmt_train.distributed.codec.half import from_half, to_half
from nmt_train.distributed.message import Message


class Dense(Codec):
    """`dtype` of what travels; float32 loses nothing, float16 travels with its exponent (codec/half.py)."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype, self.biased = dtype, dtype != torch.float32

    def encode(self, vector: Tensor, update: int) -> Message:
        """In full precision the message holds `vector` itself, not a copy; else NotFinite refuses what cannot be rounded."""
        if self._dtype == vector.dtype:
            return Message((), (vector,))
        if self._dtype == torch.float16:
            exponent, rounded = to_half(vector)
            return Message((exponent,), (rounded,))
        if not torch.isfinite(torch.linalg.vector_norm(vector)):
            raise NotFinite("the vector to be sent is not finite")
        largest = torch.finfo(self._dtype).max
        rounded = torch.empty_like(vector, dtype=self._dtype)
        for place in blocks(vector):
            rounded[place] = vector[place].clamp(-largest, largest)
        return Message((), (rounded,))

    def sized(self, vector: Tensor) -> Message:
        return Message((0,) if self._dtype == torch.float16 else (), (vector.to(self._dtype),))

    def effort(self, elements: int) -> int:
        return 0 if self._dtype == torch.float32 else elements

    def decode(self, message: Message, into: Tensor) -> None:
        into.copy_(self._vector(message, into))

    def add(self, message: Message, into: Tensor, scale: float = 1.0) -> None:
        into.add_(self._vector(message, into).to(into), alpha=scale)

    def _vector(self, message: Message, into: Tensor) -> Tensor:
        vector = message.vector(into.numel(), self._dtype)
        return from_half(message, 0, vector, into) if self._dtype == torch.float16 else vector
