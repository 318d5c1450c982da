"""The loops that select large elements on a CPU.

`bits` are always floating-point numbers, seen as int32. Without the sign bit, such integers have the same order as
the magnitudes, and what is not a number comes after all others.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nmt_train.common.compiled import compiled, zeros_below

_MAGNITUDE = np.int32(0x7FFFFFFF)
_NEARLY = np.float32(0.9)  # the next vector is probably similar

_GATHER = np.uint64(0x0102040810204080)  # the top byte of a product with it has the lowest bits of all eight bytes


@compiled
def not_below(bits: NDArray[np.int32], limit: int | np.int64, flags: NDArray[np.uint8], places: NDArray[np.int64]) -> int:
    """How many magnitudes are not below a limit (see `bits`); their positions are put into `places`, in ascending order.

    flags: scratch memory (elements, rounded up to a multiple of 64).
    """
    for j in range(len(bits)):
        flags[j] = (bits[j] & _MAGNITUDE) >= limit
    whole = -(-len(bits) // 64) * 64
    flags[len(bits) : whole] = 0
    eights = flags[:whole].view(np.uint64)
    count = 0
    for start in range(0, len(eights), 8):
        word = np.uint64(0)  # a bit per element: few are selected, and branches that depend on each would be mispredicted
        for k in range(8):
            word |= ((eights[start + k] * _GATHER) >> np.uint64(56)) << np.uint64(8 * k)
        while word:
            lowest = word & (~word + np.uint64(1))
            places[count] = 8 * start + zeros_below(lowest)
            count += 1
            word ^= lowest
    return count


@compiled
def largest_of_rows(
    rows: NDArray[np.float32],
    keep: int,
    near: NDArray[np.float32],
    positions: NDArray[np.int64],
    values: NDArray[np.float32],
) -> None:
    """Find the `keep` largest magnitudes in every row of a matrix; of equal ones, those in the lowest columns.

    near: for each row, a magnitude that probably somewhat more than `keep` elements reach; overwritten for the next call.
    positions, values: (rows * keep,), overwritten; positions count over all rows, and ascend. What is not a number counts as
    large.
    """
    columns = rows.shape[1]
    flags, places = np.empty(columns + 63, np.uint8), np.empty(columns, np.int64)
    magnitudes, chosen = np.empty(columns, np.int32), np.empty(columns + 1, np.int64)
    bits, near_bits = rows.view(np.int32), near.view(np.int32)
    for number in range(len(rows)):
        count = not_below(bits[number], np.int64(near_bits[number]), flags, places)
        if count < keep:
            count = not_below(bits[number], np.int64(0), flags, places)
        for candidate in range(count):
            magnitudes[candidate] = bits[number, places[candidate]] & _MAGNITUDE
        least = _largest(magnitudes[:count], keep)
        equal = keep
        for candidate in range(count):
            equal -= magnitudes[candidate] > least
        place = 0
        for candidate in range(count):  # without branches
            is_equal = (magnitudes[candidate] == least) & (equal > 0)
            chosen[place] = places[candidate]
            place += (magnitudes[candidate] > least) | is_equal
            equal -= is_equal
        for place in range(keep):
            positions[number * keep + place] = number * columns + chosen[place]
            values[number * keep + place] = rows[number, chosen[place]]
        near_bits[number] = least
        near[number] *= _NEARLY


@compiled
def _largest(values: NDArray[np.int32], rank: int) -> int:
    """The value that has this rank, from 1 for the largest one. Halves the range of values until it is known."""
    low, high = values.min(), values.max()
    while low < high:
        middle = low + (high - low + 1) // 2
        count = 0
        for value in values:
            count += value >= middle
        if count == rank:  # the smallest of those
            low = high
            for value in values:
                if value >= middle:
                    low = min(low, value)
            return low
        if count > rank:
            low = middle
        else:
            high = middle - 1
    return low
