"""Bytes with eight signs or five digits of base three each. On a CPU, numpy is several times as fast as torch for this."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

SIGNS, DIGITS = 8, 5  # in a byte
_NUMPY = ("cpu",)  # types of devices whose memory numpy can use
_PLACES = tuple(reversed(range(SIGNS)))


def pack_signs(vector: Tensor) -> Tensor:
    """The sign bits of `vector` (elements,), as uint8 (bytes,); the first one is the highest bit of the first byte."""
    if vector.device.type in _NUMPY:
        return torch.from_numpy(np.packbits(np.signbit(vector.numpy())))
    bits = torch.nn.functional.pad(vector.signbit().to(torch.uint8), (0, -vector.numel() % SIGNS)).view(-1, SIGNS)
    return (bits << bits.new_tensor(_PLACES)).sum(1, dtype=torch.uint8)


def unpack_signs(packed: Tensor, elements: int) -> Tensor:
    """1 and -1, as int8 (elements,)."""
    if packed.device.type in _NUMPY:
        bits = torch.from_numpy(np.unpackbits(packed.numpy(), count=elements))
    else:
        bits = (packed[:, None] >> packed.new_tensor(_PLACES)).bitwise_and_(1).view(-1)[:elements]
    return bits.view(torch.int8).mul_(-2).add_(1)


def pack_digits(digits: Tensor) -> Tensor:
    """`digits` (elements,), each -1, 0 or 1, as uint8 (bytes,): byte i of n has the digits i, n + i, 2 n + i, ..."""
    elements, count = digits.numel(), -(-digits.numel() // DIGITS)
    padded = digits.new_empty(count * DIGITS, dtype=torch.int8)
    padded[:elements], padded[elements:] = digits, 0
    first, *others = padded.add_(1).view(torch.uint8).view(DIGITS, -1)
    packed = first.clone()
    for more in others:
        packed.mul_(3).add_(more)
    return packed


def unpack_digits(packed: Tensor, elements: int) -> Tensor:
    """-1, 0 and 1, as int8 (elements,)."""
    digits = packed.new_empty(DIGITS, len(packed))
    for place in range(DIGITS - 1, 0, -1):
        rest = _third(packed)
        torch.sub(packed, rest, alpha=3, out=digits[place])
        packed = rest
    digits[0] = packed
    return digits.view(torch.int8).sub_(1).view(-1)[:elements]


def _third(packed: Tensor) -> Tensor:
    if packed.device.type in _NUMPY:
        return torch.from_numpy(packed.numpy() // 3)
    return packed.div(3, rounding_mode="floor")
