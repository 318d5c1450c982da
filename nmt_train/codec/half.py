"""Half precision with a shared exponent: precision is relative to the largest element, not limited by the fp16 minimum 6e-8."""

from __future__ import annotations

import torch
from torch import Tensor

from nmt_train.codec.chunks import blocks
from nmt_train.codec.codec import Codec
from nmt_train.codec.finite import largest_magnitude
from nmt_train.common.message import Message

_TOP = 14  # the largest element is scaled to less than 2^14, so that rounding cannot overflow
_LOWEST, _HIGHEST = -110, 128 - _TOP  # other exponents would exceed the range of fp32


def to_half(vector: Tensor) -> tuple[int, Tensor]:
    """The exponent, and `vector` (elements,) divided by 2^exponent as fp16; NotFinite if an element is not finite.

    Elements keep 11 bits down to 2^-28 of the largest element, and become zero only below 2^-39 of it.
    """
    largest = largest_magnitude(vector)
    exponent = max(_LOWEST, int(torch.frexp(largest).exponent) - _TOP) if largest > 0 else 0
    rounded = torch.empty_like(vector, dtype=torch.float16)
    for place in blocks(vector):
        rounded[place] = vector[place] * 2.0**-exponent
    return exponent, rounded


def from_half(message: Message, place: int, rounded: Tensor, like: Tensor) -> Tensor:
    """Undo `to_half`, except for rounding. The result has the type and the device of `like`.

    place: index of the exponent in the message's numbers. Raises Malformed if `to_half` cannot have produced this exponent.
    """
    exponent = message.number(place)
    if not _LOWEST <= exponent <= _HIGHEST:
        raise message.malformed(f"an exponent of {exponent}")
    return rounded.to(like).mul_(2.0**exponent)


class Half(Codec):
    """A message holds the exponent and the rounded elements."""

    summable = True

    def encode(self, vector: Tensor, update: int) -> Message:
        exponent, rounded = to_half(vector)
        return Message((exponent,), (rounded,))

    def encode_shape(self, vector: Tensor) -> Message:
        return Message((0,), (vector.to(torch.float16),))

    def decode(self, message: Message, into: Tensor) -> None:
        into.copy_(self._vector(message, into))

    def add(self, message: Message, into: Tensor, scale: float = 1.0) -> None:
        into.add_(self._vector(message, into), alpha=scale)

    def _vector(self, message: Message, into: Tensor) -> Tensor:
        return from_half(message, 0, message.vector(into.numel(), torch.float16), into)
