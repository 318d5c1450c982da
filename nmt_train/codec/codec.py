"""The interface of all codecs, which encode vectors as messages, and the attributes that compatibility checks use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from nmt_train.codec.config import CodecConfigs
from nmt_train.common.message import Message


class Codec(ABC):
    """Encodes vectors as messages and decodes them. A codec's error is the vector minus the decoded message.

    lossless: the error is zero. All other codecs are used with error feedback, so their error must be smaller than the vector.
    summable: a sum of decoded vectors can be encoded again, hop by hop around a ring.
    drops: a configured share of the elements is not sent. fixed_share: this share does not depend on the number of workers.
    """

    lossless: bool = False
    summable: ClassVar[bool] = False
    drops: ClassVar[bool] = False
    fixed_share: ClassVar[bool] = False

    @classmethod
    def build(cls, configs: CodecConfigs, dropped: float) -> Codec:
        """The configured codec. dropped: the share of elements not sent, if it `drops`."""
        return cls()

    @abstractmethod
    def encode(self, vector: Tensor, update: int) -> Message:
        """The message for `vector` (elements,), with which it may share memory.

        update: number of updates so far, for codecs that change during training. Lossy codecs raise NotFinite if the message
        would contain infinities or NaN; `Dense` does not check.
        """

    @abstractmethod
    def encode_shape(self, vector: Tensor) -> Message:
        """A message of about the size that `encode` returns. `vector` may be on torch's `meta` device."""

    def cost_elements(self, elements: int) -> int:
        """Number of elements that encoding processes: 0 if the vector itself is sent."""
        return elements

    @abstractmethod
    def decode(self, message: Message, into: Tensor) -> None:
        """Overwrite `into` (elements,) with the decoded vector. Raises Malformed if the message does not fit."""

    def add(self, message: Message, into: Tensor, scale: float = 1.0) -> None:
        """Add `scale` times the decoded vector to `into`."""
        decoded = torch.empty_like(into)
        self.decode(message, decoded)
        into.add_(decoded, alpha=scale)

    def encode_away(self, vector: Tensor, update: int) -> Message:
        """Encode `vector`, and leave in it only the error (see `left_out`), or what it was if NotFinite is raised.

        The message shares no memory with `vector`.
        """
        message = self.encode(vector, update)
        if any(tensor.untyped_storage().data_ptr() == vector.untyped_storage().data_ptr() for tensor in message.tensors):
            message = Message(message.numbers, tuple(tensor.clone() for tensor in message.tensors))
        self.add(message, vector, scale=-1.0)
        return message

    def left_out(self, message: Message, vector: Tensor, into: Tensor) -> None:
        """Overwrite `into` with the error: what `message`, encoded from `vector`, leaves out of it.

        `into` must not share memory with `vector`.
        """
        into.copy_(vector)
        self.add(message, into, scale=-1.0)

    def split(self, message: Message, vector: Tensor, error: Tensor, scale: float = 1.0) -> None:
        """Overwrite `vector`, from which `message` was encoded, with the decoded message, and `error` with `scale` times the
        difference.
        """
        error.copy_(vector)
        self.decode(message, vector)
        error.sub_(vector).mul_(scale)
