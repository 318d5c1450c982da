"""The loops of low-bit codecs for GPUs. One launch does for all matrices what takes several for each of them with torch.

Vectors (elements,), `rows` (rows of all matrices, 4) and `magnitudes` (numbers,) are as in low_bit_kernels.py. `matrices` has a
line (matrices, 4) for each matrix: the index of its first magnitude, its rows, its columns, and the line of its first row in
`rows`. `strips` has a line (strips, 5) for each strip of STRIP columns: the matrix's first element, its rows, its columns, the
strip's first column, and the index of that column's magnitude.
"""

from __future__ import annotations

import triton
import triton.language as tl

STRIP = 64  # columns
BLOCK = 512  # elements of a row, numbers or bytes that are worked on at once
_BLOCK = tl.constexpr(BLOCK)
_ROWS, _COLUMNS = tl.constexpr(32), tl.constexpr(STRIP)
_TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal number of fp32
PUT, ADD, SPLIT, LEFT_OUT = range(4)
_ADD, _SPLIT = tl.constexpr(ADD), tl.constexpr(SPLIT)


@triton.jit
def row_means(vector, rows, magnitudes):
    """The mean absolute value of each row. One program per row."""
    row = rows + 4 * tl.program_id(0)
    start, columns, of_row = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    total = tl.zeros((_BLOCK,), tl.float32)
    for first in range(0, columns, _BLOCK):
        places = first + tl.arange(0, _BLOCK)
        total += tl.abs(tl.load(vector + start + places, places < columns, 0.0))
    tl.store(magnitudes + of_row, tl.sum(total) / columns)


@triton.jit
def column_means(vector, strips, magnitudes):
    """The mean absolute value of each column. One program per strip."""
    strip = strips + 5 * tl.program_id(0)
    start, rows, columns, first, into = (
        tl.load(strip), tl.load(strip + 1), tl.load(strip + 2), tl.load(strip + 3), tl.load(strip + 4),
    )  # fmt: skip
    own = tl.arange(0, _COLUMNS)
    inside = first + own < columns
    total = tl.zeros((_ROWS, _COLUMNS), tl.float32)
    for above in range(0, rows, _ROWS):
        lines = above + tl.arange(0, _ROWS)
        places = start + lines[:, None] * columns + (first + own)[None, :]
        total += tl.abs(tl.load(vector + places, (lines < rows)[:, None] & inside[None, :], 0.0))
    tl.store(magnitudes + into + own, tl.sum(total, 0) / rows, inside)


@triton.jit
def normalize(matrices, magnitudes):
    """Make the product of means one of rank one with the mean absolute value of each row and column. One program per matrix."""
    matrix = matrices + 4 * tl.program_id(0)
    place, rows, columns = tl.load(matrix), tl.load(matrix + 1), tl.load(matrix + 2)
    total = tl.zeros((_BLOCK,), tl.float64)
    for first in range(0, rows, _BLOCK):
        own = first + tl.arange(0, _BLOCK)
        total += tl.load(magnitudes + place + own, own < rows, 0.0)
    # Rows and columns of similar size need the smallest range of codes.
    root = tl.maximum(tl.sqrt((tl.sum(total) / rows).to(tl.float32)), _TINY)
    for first in range(0, rows + columns, _BLOCK):
        own = first + tl.arange(0, _BLOCK)
        inside = own < rows + columns
        tl.store(magnitudes + place + own, tl.load(magnitudes + place + own, inside, 0.0) / root, inside)


@triton.jit
def approximate(vector, rows, magnitudes, threshold, sums, digits, THREE: tl.constexpr):  # noqa: N803
    """For each row, the products of its absolute values with the approximation, and of the approximation with itself, summed up
    into `sums` (rows, 2). If there are three values, write 1, -1 and 0 into `digits` (elements,), and the approximation is 0
    where the digit is. One program per row.
    """
    number = tl.program_id(0)
    row = rows + 4 * number
    start, columns, of_row, of_columns = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    factor = tl.load(magnitudes + of_row)
    scale, size = tl.zeros((_BLOCK,), tl.float32), tl.zeros((_BLOCK,), tl.float32)
    for first in range(0, columns, _BLOCK):
        places = first + tl.arange(0, _BLOCK)
        inside = places < columns
        value = tl.load(vector + start + places, inside, 0.0)
        kept = factor * tl.load(magnitudes + of_columns + places, inside, 0.0)
        if THREE:
            sent = tl.abs(value) >= kept * threshold
            kept = tl.where(sent, kept, 0.0)
            tl.store(digits + start + places, tl.where(sent, tl.where(value >= 0, 1, -1), 0).to(tl.int8), inside)
        scale += tl.abs(value) * kept
        size += kept * kept
    tl.store(sums + 2 * number, tl.sum(scale))
    tl.store(sums + 2 * number + 1, tl.sum(size))


@triton.jit
def rescale(matrices, sums, magnitudes):
    """Give the approximation the scale with the smallest squared error. One program per matrix."""
    matrix = matrices + 4 * tl.program_id(0)
    place, rows, line = tl.load(matrix), tl.load(matrix + 1), tl.load(matrix + 3)
    scale, size = tl.zeros((_BLOCK,), tl.float64), tl.zeros((_BLOCK,), tl.float64)
    for first in range(0, rows, _BLOCK):
        own = first + tl.arange(0, _BLOCK)
        scale += tl.load(sums + 2 * (line + own), own < rows, 0.0)
        size += tl.load(sums + 2 * (line + own) + 1, own < rows, 0.0)
    factor = (tl.sum(scale) / tl.maximum(tl.sum(size), _TINY)).to(tl.float32)
    for first in range(0, rows, _BLOCK):
        own = first + tl.arange(0, _BLOCK)
        tl.store(magnitudes + place + own, tl.load(magnitudes + place + own, own < rows, 0.0) * factor, own < rows)


@triton.jit(do_not_specialize=["elements", "count"])
def pack_digits(digits, packed, elements, count):
    """As packing.pack_digits. One program for each _BLOCK of the `count` bytes."""
    byte = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    found = tl.zeros((_BLOCK,), tl.int32)
    for place in tl.static_range(5):
        element = place * count + byte
        found = found * 3 + 1 + tl.load(digits + element, (byte < count) & (element < elements), 0)
    tl.store(packed + byte, found.to(tl.uint8), byte < count)


@triton.jit(do_not_specialize=["elements", "count"])
def pack_signs(bits, packed, elements, count):
    """As packing.pack_signs; bits: the vector as int32. One program for each _BLOCK of the `count` bytes."""
    byte = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    found = tl.zeros((_BLOCK,), tl.int32)
    for place in tl.static_range(8):
        element = 8 * byte + place
        found = found * 2 + (tl.load(bits + element, element < elements, 0) < 0)
    tl.store(packed + byte, found.to(tl.uint8), byte < count)


@triton.jit(do_not_specialize=["count"])
def decode(
    rows, packed, codes, powers, largest, vector, into, count, scale, THREE: tl.constexpr, OPERATION: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Decode a message of `count` bytes. One program per row.

    PUT: overwrite `into`. ADD: add `scale` times what is decoded. SPLIT: overwrite `vector` with what is decoded, and `into`
    with `scale` times what it leaves out. LEFT_OUT: overwrite `into` with what is left out of `vector`.
    """
    row = rows + 4 * tl.program_id(0)
    start, columns, of_row, of_columns = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    unit = tl.load(largest)
    # Old versions of Triton take an offset of 8 bits for a signed one.
    factor = unit * tl.load(powers + tl.load(codes + of_row).to(tl.int32))
    for first in range(0, columns, _BLOCK):
        places = first + tl.arange(0, _BLOCK)
        inside = places < columns
        element = (start + places).to(tl.int32)
        if THREE:
            byte, place = element % count, element // count
            unsigned = tl.load(packed + byte, inside, 0).to(tl.int32)
            power = tl.where(place == 0, 81, tl.where(place == 1, 27, tl.where(place == 2, 9, tl.where(place == 3, 3, 1))))
            sign = (unsigned // power) % 3 - 1
        else:
            unsigned = tl.load(packed + element // 8, inside, 0).to(tl.int32)
            sign = 1 - 2 * ((unsigned >> (7 - element % 8)) & 1)
        factors = unit * tl.load(powers + tl.load(codes + of_columns + places, inside, 0).to(tl.int32))
        found = sign.to(tl.float32) * factor * factors
        if OPERATION == _ADD:
            found = tl.load(into + element, inside, 0.0) + scale * found
        if OPERATION >= _SPLIT:  # or LEFT_OUT
            rest = tl.load(vector + element, inside, 0.0) - found
            if OPERATION == _SPLIT:
                tl.store(vector + element, found, inside)
                rest = scale * rest
            found = rest
        tl.store(into + element, found, inside)
