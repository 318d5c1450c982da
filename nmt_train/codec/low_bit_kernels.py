"""The loops of low-bit codecs for CPUs: a few passes over memory, instead of one for each operation of torch.

Everywhere, vectors (elements,) consist of matrices of `shapes` (matrices, 2), their rows and columns; and `magnitudes`
(numbers,) has a number for each row of the first matrix, for each of its columns, for each row of the second one, and so on.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nmt_train.common.compiled import compiled, compiled_sums, part_of_sums

Floats = NDArray[np.float32]
Whole = NDArray[np.int64]
Signs = NDArray[np.int8]

_TINY = np.float32(np.finfo(np.float32).tiny)
_FLOAT = np.float32  # numba computes in double precision where a constant is a number of Python


@compiled_sums
def two_values(vector: Floats, shapes: Whole, magnitudes: Floats) -> None:
    """Find the magnitudes, whose product of rank one approximates the absolute values of each matrix."""
    start = place = 0
    for number in range(len(shapes)):
        rows, columns = shapes[number]
        matrix = vector[start : start + rows * columns].reshape(rows, columns)
        of_rows = magnitudes[place : place + rows]
        of_columns = magnitudes[place + rows : place + rows + columns]
        _means(matrix, of_rows, of_columns)
        scale = 0.0
        for i in range(rows):
            row, total = matrix[i], _FLOAT(0)
            for j in range(columns):
                total += abs(row[j]) * of_columns[j]
            scale += of_rows[i] * total
        size = np.float64(np.square(of_rows).sum()) * np.float64(np.square(of_columns).sum())
        of_rows *= _FLOAT(scale / np.maximum(size, _TINY))  # the scale with the smallest squared error
        start += rows * columns
        place += rows + columns


@compiled_sums
def three_values(vector: Floats, shapes: Whole, threshold: float, magnitudes: Floats, signs: Signs) -> None:
    """As `two_values`, but small elements become 0: those below `threshold` times the product of the mean absolute values of
    their row and column. Overwrites `signs` (elements,) with 1, -1 and 0.
    """
    start = place = 0
    for number in range(len(shapes)):
        rows, columns = shapes[number]
        matrix = vector[start : start + rows * columns].reshape(rows, columns)
        of_rows = magnitudes[place : place + rows]
        of_columns = magnitudes[place + rows : place + rows + columns]
        _means(matrix, of_rows, of_columns)
        scale = size = 0.0
        for i in range(rows):
            row, found = matrix[i], signs[start + i * columns : start + (i + 1) * columns]
            row_scale = row_size = _FLOAT(0)
            for j in range(columns):
                product = of_rows[i] * of_columns[j]
                sent = abs(row[j]) >= product * _FLOAT(threshold)
                kept = product if sent else _FLOAT(0)
                row_scale += abs(row[j]) * kept
                row_size += kept * kept
                found[j] = np.int8(sent) * (np.int8(row[j] >= 0) * 2 - 1)
            scale += float(row_scale)
            size += float(row_size)
        of_rows *= _FLOAT(scale / np.maximum(size, _TINY))
        start += rows * columns
        place += rows + columns


@part_of_sums
def _means(matrix: Floats, of_rows: Floats, of_columns: Floats) -> None:
    """Factors of rank one that have the mean absolute value of each row and of each column of the matrix."""
    of_columns[:] = 0
    for i in range(len(of_rows)):
        row, total = matrix[i], _FLOAT(0)
        for j in range(len(of_columns)):
            total += abs(row[j])
            of_columns[j] += abs(row[j])
        of_rows[i] = total / _FLOAT(len(of_columns))
    root = np.maximum(np.sqrt(of_rows.mean()), _TINY)  # rows and columns of similar size need the smallest range of codes
    of_rows /= root
    of_columns /= root * _FLOAT(len(of_rows))


def rows_of(shapes: Whole) -> Whole:
    """A line (4,) for each row of all matrices: its first element, its length, the index of its magnitude, and the index of the
    magnitude of the matrix's first column. The following loops are over these rows.
    """
    found, start, place = [np.empty((0, 4), np.int64)], 0, 0
    for rows, columns in shapes:
        own = np.arange(rows)
        found.append(np.stack([start + own * columns, own * 0 + columns, place + own, own * 0 + place + rows], 1))
        start += rows * columns
        place += rows + columns
    return np.concatenate(found)


@compiled
def put(rows: Whole, signs: Signs, magnitudes: Floats, into: Floats) -> None:
    """Overwrite `into` with the signs (-1, 0 or 1) times the products of magnitudes."""
    for number in range(len(rows)):
        start, columns, of_row, of_columns = rows[number]
        factor, factors = magnitudes[of_row], magnitudes[of_columns : of_columns + columns]
        its, row = signs[start : start + columns], into[start : start + columns]
        for j in range(columns):
            row[j] = _FLOAT(its[j]) * factor * factors[j]


@compiled
def add(rows: Whole, signs: Signs, magnitudes: Floats, into: Floats, scale: float) -> None:
    """Add `scale` times what `put` would put."""
    for number in range(len(rows)):
        start, columns, of_row, of_columns = rows[number]
        factor, factors = magnitudes[of_row], magnitudes[of_columns : of_columns + columns]
        its, row = signs[start : start + columns], into[start : start + columns]
        for j in range(columns):
            row[j] += _FLOAT(scale) * (_FLOAT(its[j]) * factor * factors[j])


@compiled
def split(rows: Whole, signs: Signs, magnitudes: Floats, vector: Floats, error: Floats, scale: float) -> None:
    """Overwrite `vector` with what `put` would put, and `error` with `scale` times the difference."""
    for number in range(len(rows)):
        start, columns, of_row, of_columns = rows[number]
        factor, factors = magnitudes[of_row], magnitudes[of_columns : of_columns + columns]
        its, row, rest = signs[start : start + columns], vector[start : start + columns], error[start : start + columns]
        for j in range(columns):
            product = _FLOAT(its[j]) * factor * factors[j]
            rest[j] = _FLOAT(scale) * (row[j] - product)
            row[j] = product


@compiled
def left_out(rows: Whole, vector: Floats, magnitudes: Floats, into: Floats) -> None:
    """Overwrite `into` with `vector` minus the products of magnitudes that have the signs of its elements."""
    bits = vector.view(np.int32)  # -0.0 has a sign, too
    for number in range(len(rows)):
        start, columns, of_row, of_columns = rows[number]
        factor, factors = magnitudes[of_row], magnitudes[of_columns : of_columns + columns]
        its, row, rest = bits[start : start + columns], vector[start : start + columns], into[start : start + columns]
        for j in range(columns):
            product = factor * factors[j]
            rest[j] = row[j] + product if its[j] < 0 else row[j] - product
