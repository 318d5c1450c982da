"""Low-bit codecs for GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from nmt_train.codec import low_bit_gpu_kernels as kernels
from nmt_train.codec.low_bit import THRESHOLD, LowBit, powers
from nmt_train.codec.low_bit_kernels import rows_of
from nmt_train.common.message import Message


class GpuLowBit(LowBit):
    """The same codec in few launches: with torch, a GPU spends most of the time waiting for the next one (docs/benchmarks.md).

    Magnitudes may be rounded in another way.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]], values: int, scratch: Tensor) -> None:
        super().__init__(shapes, values, scratch)
        sizes = np.array(shapes, np.int64).reshape(-1, 2)
        rows, matrices, strips = rows_of(sizes), [], []
        start = place = line = 0
        for height, width in sizes.tolist():
            matrices.append((place, height, width, line))
            strips += [(start, height, width, first, place + height + first) for first in range(0, width, kernels.STRIP)]
            start, place, line = start + height * width, place + height + width, line + height
        self._row_table, self._matrix_table, self._strip_table = (
            torch.from_numpy(np.array(table, np.int64)).to(scratch.device) for table in (rows, matrices, strips)
        )

    def _approximated(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        vector, three = self._checked(vector), not self._only_signs
        magnitudes, sums = vector.new_empty(self._numbers), vector.new_empty(len(self._row_table), 2)
        digits = self._scratch[0].view(torch.int8)[: self._elements]
        _each(self._row_table, kernels.row_means, vector, self._row_table, magnitudes)
        _each(self._strip_table, kernels.column_means, vector, self._strip_table, magnitudes)
        _each(self._matrix_table, kernels.normalize, self._matrix_table, magnitudes)
        _each(self._row_table, kernels.approximate, vector, self._row_table, magnitudes, THRESHOLD, sums, digits, THREE=three)
        _each(self._matrix_table, kernels.rescale, self._matrix_table, sums, magnitudes)
        packed = vector.new_empty(self._bytes, dtype=torch.uint8)
        pack, what = (kernels.pack_digits, digits) if three else (kernels.pack_signs, vector.view(torch.int32))
        _each(range(0, self._bytes, kernels.BLOCK), pack, what, packed, self._elements, self._bytes)
        return magnitudes, packed

    def decode(self, message: Message, into: Tensor) -> None:
        self._decode(kernels.PUT, message, into, into, 1.0)

    def add(self, message: Message, into: Tensor, scale: float = 1.0) -> None:
        self._decode(kernels.ADD, message, into, into, scale)

    def left_out(self, message: Message, vector: Tensor, into: Tensor) -> None:
        self._decode(kernels.LEFT_OUT, message, vector, into, 1.0)

    def split(self, message: Message, vector: Tensor, error: Tensor, scale: float = 1.0) -> None:
        self._decode(kernels.SPLIT, message, vector, error, scale)

    def _decode(self, operation: int, message: Message, vector: Tensor, into: Tensor, scale: float) -> None:
        largest, codes, _ = self._parts(message)
        packed = self._packed(message)
        vector, into = self._checked(vector), self._checked(into)
        more = {"THREE": not self._only_signs, "OPERATION": operation}
        tables = self._row_table, packed, codes, powers(codes.device), largest
        _each(self._row_table, kernels.decode, *tables, vector, into, self._bytes, float(scale), **more)

    def _checked(self, vector: Tensor) -> Tensor:
        """Kernels do not check bounds, so this raises RuntimeError if the vector has another length or gaps."""
        if vector.shape != (self._elements,) or not vector.is_contiguous() or vector.dtype != torch.float32:
            raise RuntimeError(f"a vector of {vector.dtype} with shape {tuple(vector.shape)} and strides {vector.stride()}")
        return vector


def _each(table: Any, kernel: triton.JITFunction, *arguments: Any, **more: Any) -> None:
    """Start a program for each line of a table. Without fusion of products and sums, all devices decode the same bits."""
    if len(table):
        kernel[(len(table),)](*arguments, **more, enable_fp_fusion=False)
