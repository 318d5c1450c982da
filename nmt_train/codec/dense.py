"""All of a vector, in full or half precision."""

from __future__ import annotations

import torch
from torch import Tensor

from nmt_train.codec import Codec
from nmt_train.codec.blocks import blocks
from nmt_train.errors import NotFinite
from nmt_train.message import Message


class Dense(Codec):
    """`dtype` of what travels; float32 loses nothing."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype

    def encode(self, vector: Tensor, update: int) -> Message:
        """In full precision the message holds `vector` itself, not a copy; else NotFinite refuses what cannot be rounded."""
        if self._dtype == vector.dtype:
            return Message((), (vector,))
        if not torch.isfinite(torch.linalg.vector_norm(vector)):
            raise NotFinite("the vector to be sent is not finite")
        largest = torch.finfo(self._dtype).max
        rounded = torch.empty_like(vector, dtype=self._dtype)
        for place in blocks(vector):
            rounded[place] = vector[place].clamp(-largest, largest)
        return Message((), (rounded,))

    def sized(self, vector: Tensor) -> Message:
        return Message((), (vector.to(self._dtype),))

    def effort(self, elements: int) -> int:
        return 0 if self._dtype == torch.float32 else elements

    def decode(self, message: Message, into: Tensor) -> None:
        into.copy_(self._vector(message, into))

    def add(self, message: Message, into: Tensor, sign: int = 1) -> None:
        into.add_(self._vector(message, into).to(into), alpha=sign)

    def _vector(self, message: Message, into: Tensor) -> Tensor:
        return message.vector(into.numel(), self._dtype)
