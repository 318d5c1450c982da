"""Messages without values, for simulations of timing only."""

from __future__ import annotations

from torch import Tensor

from nmt_train.codec.codec import Codec
from nmt_train.common.message import Message


class SizeOnly(Codec):
    """Wraps any codec for vectors that have a size but no values: messages have the right length, and decoding does nothing."""

    def __init__(self, codec: Codec) -> None:
        self._codec, self.lossless = codec, codec.lossless

    def encode(self, vector: Tensor, update: int) -> Message:
        return self._codec.encode_shape(vector)

    def encode_shape(self, vector: Tensor) -> Message:
        return self._codec.encode_shape(vector)

    def cost_elements(self, elements: int) -> int:
        return self._codec.cost_elements(elements)

    def decode(self, message: Message, into: Tensor) -> None:
        return None

    def add(self, message: Message, into: Tensor, scale: float = 1.0) -> None:
        return None

    def left_out(self, message: Message, vector: Tensor, into: Tensor) -> None:
        return None
