"""How vectors are encoded in messages: what every codec does, and what it can be combined with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from nmt_train.distributed.message import Message


class Codec(ABC):
    """Turns a vector into a message and back. The part of a vector that a message leaves out is the codec's loss.

    lossless: there is no loss.
    biased: the expected value of the loss is not zero, so that error feedback is needed. An unbiased codec must have none: its
    loss may be larger than the vector, and feedback would multiply it from message to message.
    summable: a sum of decoded vectors can be encoded again, hop by hop around a ring.
    exact_sums: sums of decoded vectors do not depend on their order, to the bit.
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
        """The message for `vector` (elements,); update: number of updates so far, for what changes during training.

        NotFinite if the message would hold infinite values or values that are not numbers.
        """

    @abstractmethod
    def encode_shape(self, vector: Tensor) -> Message:
        """A message as long as `encode` makes after warm-up, for a vector without values (torch's `meta` device)."""

    def cost_elements(self, elements: int) -> int:
        """Number of elements that encoding processes: 0 if the vector itself is sent."""
        return elements

    @abstractmethod
    def decode(self, message: Message, into: Tensor) -> None:
        """Overwrite `into` (elements,) with the vector that the message stands for."""

    @abstractmethod
    def add(self, message: Message, into: Tensor, scale: float = 1.0) -> None:
        """Add `scale` times that vector to `into`."""
