"""Compact codes for arrays of integers: fixed width, unary and Golomb-Rice. All arrays are NumPy arrays.

Codes are stored in planes: first the unary parts of all numbers, then the lowest bits of all remaining parts, and so on.
Planes take as many bits as codes stored one by one, plus up to seven bits per plane.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nmt_train.common.compiled import compiled, zeros_below

Bytes = NDArray[np.uint8]
Whole = NDArray[np.int64]

_REVERSED = np.packbits(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1), axis=1, bitorder="little").ravel()


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
    packed = np.zeros(-(-(int(values.sum()) + len(values)) // 8), np.uint8)
    _put_ones(values, packed)
    return packed


def from_unary(packed: Bytes, count: int) -> tuple[Whole, int]:
    """The values, and how many bytes they took."""
    values = np.empty(count, np.int64)
    used = _distances(packed, values)
    if used < 0:
        raise ValueError(f"fewer than {count} numbers in {len(packed)} bytes")
    return values, used


@compiled
def _put_ones(values: Whole, packed: Bytes) -> None:
    place = -1
    for value in values:
        place += value + 1
        packed[place >> 3] |= np.uint8(128 >> (place & 7))


@compiled
def _distances(packed: Bytes, values: Whole) -> int:
    """Overwrite `values` with the numbers of zeros before each one. Returns how many bytes they took; -1: there are fewer."""
    found, last = 0, -1
    for start in range(0, len(packed), 8):
        word = np.uint64(0)  # with its bits in reverse order: the next one is the lowest
        for byte in range(start, min(start + 8, len(packed))):
            word |= np.uint64(_REVERSED[packed[byte]]) << np.uint64(8 * (byte - start))
        while word and found < len(values):
            lowest = word & (~word + np.uint64(1))
            place = 8 * start + zeros_below(lowest)
            values[found] = place - last - 1
            last = place
            found += 1
            word ^= lowest
        if found == len(values):
            break
    return last // 8 + 1 if found == len(values) else -1


def rice_width(density: float) -> int:
    """The number of fixed bits for gaps between selected elements; density: the fraction that is selected (Golomb 1966)."""
    return max(0, round(math.log2(math.log(2) / density))) if 0 < density < 1 else 0


def rice(values: Whole, width: int) -> Bytes:
    """The Rice code (Golomb code with divisor 2^width): the part above the lowest `width` bits in unary, then these bits."""
    return np.concatenate([unary(values >> width), fixed(values, width)])


def from_rice(packed: Bytes, count: int, width: int) -> Whole:
    values, used = from_unary(packed, count)
    values <<= width  # in place: new memory would take longer than the computation
    values |= from_fixed(packed[used:], count, width)
    return values
