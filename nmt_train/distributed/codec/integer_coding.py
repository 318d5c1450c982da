"""Compact codes for arrays of integers: fixed width, unary, Elias gamma and Golomb-Rice. All arrays are NumPy arrays.

Codes are stored in planes, so that no loop over the numbers is needed: first the unary parts of all numbers, then the lowest
bits of all remaining parts, and so on. Planes take as many bits as codes stored one by one, plus up to seven bits per plane.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Whole = NDArray[np.int64]


def fixed(values: Whole, width: int) -> Bytes:
    """The lowest `width` bits of each value, as planes: the lowest bits of all values, then the next bits, and so on."""
    low = values.astype(_smallest_type(width))
    return np.concatenate([np.packbits((low & (1 << place)).astype(bool)) for place in range(width)] or [np.empty(0, np.uint8)])


def from_fixed(packed: Bytes, count: int, width: int) -> Whole:
    if len(packed) < width * -(-count // 8):
        raise ValueError(f"{count} numbers of {width} bits do not fit in {len(packed)} bytes")
    values = np.zeros(count, _smallest_type(width))
    each = -(-count // 8)
    for place in range(width):
        plane = np.unpackbits(packed[place * each : (place + 1) * each], count=count)
        values |= plane.astype(values.dtype) << place
    return values.astype(np.int64)


def _smallest_type(width: int) -> np.dtype[Any]:
    """The smallest unsigned type of at least `width` bits; smaller arrays are faster."""
    return np.min_scalar_type((1 << width) - 1)


def unary(values: Whole) -> Bytes:
    """Encode each value as that many zeros followed by a one."""
    ends = np.cumsum(values + 1) - 1
    bits = np.zeros(int(ends[-1]) + 1 if len(ends) else 0, np.uint8)
    bits[ends] = 1
    return np.packbits(bits)


def from_unary(packed: Bytes, count: int) -> tuple[Whole, int]:
    """The values, and how many bytes they took."""
    if not count:
        return np.empty(0, np.int64), 0
    looked_at = count // 4 + 8  # bytes: two bits per value; doubled until it is enough
    while len(ends := np.flatnonzero(np.unpackbits(packed[:looked_at]).view(bool))) < count:
        if looked_at >= len(packed):
            raise ValueError(f"fewer than {count} numbers in {len(packed)} bytes")
        looked_at *= 2
    ends = ends[:count].astype(np.int64)
    return np.diff(ends, prepend=-1) - 1, int(ends[-1]) // 8 + 1


def gamma(values: Whole) -> Bytes:
    """The Elias gamma code of values of at least 1: the number of bits after the leading one, in unary, and these bits."""
    lengths = np.frexp(values.astype(np.float64))[1].astype(np.int64) - 1
    planes = [unary(lengths)]
    for place in range(int(lengths.max(initial=0))):
        planes.append(fixed(values[lengths > place] >> place, 1))
    return np.concatenate(planes)


def from_gamma(packed: Bytes, count: int) -> Whole:
    lengths, used = from_unary(packed, count)
    if lengths.max(initial=0) > 62:
        raise ValueError("a number is too large")
    values = np.left_shift(np.int64(1), lengths)
    for place in range(int(lengths.max(initial=0))):
        there = lengths > place
        held = int(there.sum())
        values[there] |= from_fixed(packed[used:], held, 1) << place
        used += -(-held // 8)
    return values


def rice_width(density: float) -> int:
    """The number of fixed bits for gaps between selected elements; density: the fraction that is selected (Golomb 1966)."""
    return max(0, round(math.log2(math.log(2) / density))) if 0 < density < 1 else 0


def rice(values: Whole, width: int) -> Bytes:
    """The Rice code (Golomb code with divisor 2^width): the part above the lowest `width` bits in unary, then these bits."""
    return np.concatenate([unary(values >> width), fixed(values, width)])


def from_rice(packed: Bytes, count: int, width: int) -> Whole:
    high, used = from_unary(packed, count)
    return (high << width) | from_fixed(packed[used:], count, width)
