"""The interface of all codecs, which encode vectors as messages, and the properties that decide how to combine them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from nmt_train.distributed.message import Message


class Codec(ABC):
    """Turns a vector into a message and back. The part of a vector that a message leaves out is the codec's loss.

    lossless: there is no loss.
    biased: the expected value of the loss is not zero, so that error feedback is needed. An unbiased codec must not use error
    feedback: its loss may be larger than the vector, and feedback would multiply it from message to message.
    summable: a sum of decoded vectors can be encoded again, hop by hop around a ring.
    exact_sums: the sum of decoded vectors is bit-identical in any order of addition.
    drops: a configured share of the elements is not sent.
    """

    lossless: ClassVar[bool] = False
    biased: bool = True
    summable: ClassVar[bool] = False
    exact_sums: ClassVar[bool] = False
    drops: ClassVar[bool] = False

    @classmethod
    def build(cls, settings: Any, dropped: float) -> Codec:
        """A codec as configured; settings: the whole configuration; dropped: the share of elements that is not sent."""
        return cls()

    @abstractmethod
    def encode(self, vector: Tensor, update: int) -> Message:
        """The message for `vector` (elements,); update: number of updates so far, for codecs that change during training.

        NotFinite if the message would hold infinite values or values that are not numbers.
        """

    @abstractmethod
    def encode_shape(self, vector: Tensor) -> Message:
        """A message as long as that of `encode` after the warm-up, for a vector without values (on torch's `meta` device)."""

    def cost_elements(self, elements: int) -> int:
        """Number of elements that encoding processes: 0 if the vector itself is sent."""
        return elements

    @abstractmethod
    def decode(self, message: Message, into: Tensor) -> None:
        """Overwrite `into` (elements,) with the vector that the message stands for."""

    @abstractmethod
    def add(self, message: Message, into: Tensor, scale: float = 1.0) -> None:
        """Add `scale` times the decoded vector to `into`."""
