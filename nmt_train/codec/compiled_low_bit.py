"""Low-bit codecs for CPUs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nmt_train.codec import low_bit_kernels as kernels
from nmt_train.codec.low_bit import THRESHOLD, LowBit
from nmt_train.codec.packing import pack_digits, pack_signs
from nmt_train.common.message import Message


class CompiledLowBit(LowBit):
    """The same codec with compiled loops (docs/benchmarks.md). Magnitudes may be rounded in another way."""

    def __init__(self, shapes: Sequence[tuple[int, int]], values: int, scratch: Tensor) -> None:
        super().__init__(shapes, values, scratch)
        self._sizes = np.array(shapes, np.int64).reshape(-1, 2)
        self._rows = kernels.rows_of(self._sizes)

    def _approximated(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        magnitudes = np.empty(self._numbers, np.float32)
        if self._only_signs:
            kernels.two_values(self._array(vector), self._sizes, magnitudes)
            packed = pack_signs(vector)
        else:
            signs = self._scratch[0].view(torch.int8)[: self._elements]  # new memory would take longer
            kernels.three_values(self._array(vector), self._sizes, THRESHOLD, magnitudes, signs.numpy())
            packed = pack_digits(signs)
        return torch.from_numpy(magnitudes), packed

    def decode(self, message: Message, into: Tensor) -> None:
        kernels.put(*self._read(message), self._array(into))

    def add(self, message: Message, into: Tensor, scale: float = 1.0) -> None:
        kernels.add(*self._read(message), self._array(into), float(scale))

    def left_out(self, message: Message, vector: Tensor, into: Tensor) -> None:
        if self._only_signs:
            magnitudes = self._magnitudes_in(message).numpy()
            kernels.left_out(self._rows, self._array(vector), magnitudes, self._array(into))
        else:
            super().left_out(message, vector, into)

    def split(self, message: Message, vector: Tensor, error: Tensor, scale: float = 1.0) -> None:
        kernels.split(*self._read(message), self._array(vector), self._array(error), float(scale))

    def _read(self, message: Message) -> tuple[kernels.Whole, kernels.Signs, kernels.Floats]:
        """The rows, signs and magnitudes that the loops need."""
        return self._rows, self._signs(message).numpy(), self._magnitudes_in(message).numpy()

    def _array(self, vector: Tensor) -> NDArray[np.float32]:
        """Compiled loops do not check bounds, so this raises RuntimeError if the vector has another length or gaps."""
        array: NDArray[np.float32] = vector.view(self._elements).numpy()
        if not array.flags.c_contiguous or array.dtype != np.float32:
            raise RuntimeError(f"a vector of {array.dtype} with strides {array.strides}")
        return array
