"""Low-bit codecs for CPUs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nmt_train.distributed.codec import low_bit_kernels as kernels
from nmt_train.distributed.codec.low_bit import STEP, THRESHOLD, LowBit
from nmt_train.distributed.codec.packing import pack_digits, pack_signs
from nmt_train.distributed.message import Message


class CompiledLowBit(LowBit):
    """The same codec with compiled loops, which take a third of the time. Magnitudes may be rounded in another way."""

    def __init__(self, shapes: Sequence[tuple[int, int]], values: int, scratch: Tensor) -> None:
        super().__init__(shapes, values, scratch)
        self._sizes = np.array(shapes, np.int64).reshape(-1, 2)

    def _approximated(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        magnitudes = np.empty(self._numbers, np.float32)
        if self._only_signs:
            kernels.two_values(vector.numpy(), self._sizes, magnitudes)
            packed = pack_signs(vector)
        else:
            signs = self._scratch[0].view(torch.int8)[: self._elements]  # new memory would take longer
            kernels.three_values(vector.numpy(), self._sizes, THRESHOLD, magnitudes, signs.numpy())
            packed = pack_digits(signs)
        return torch.from_numpy(magnitudes), packed

    def _codes(self, magnitudes: Tensor, largest: Tensor) -> Tensor:
        codes = torch.empty(len(magnitudes), dtype=torch.uint8)
        kernels.logarithms(magnitudes.numpy(), float(largest), STEP, codes.numpy())
        return codes

    def decode(self, message: Message, into: Tensor) -> None:
        kernels.put(self._signs(message).numpy(), self._sizes, self._magnitudes_in(message).numpy(), into.numpy())

    def add(self, message: Message, into: Tensor, scale: float = 1.0) -> None:
        kernels.add(self._signs(message).numpy(), self._sizes, self._magnitudes_in(message).numpy(), into.numpy(), scale)

    def left_out(self, message: Message, vector: Tensor, into: Tensor) -> None:
        if self._only_signs:
            kernels.left_out(vector.numpy(), self._sizes, self._magnitudes_in(message).numpy(), into.numpy())
        else:
            super().left_out(message, vector, into)

    def split(self, message: Message, vector: Tensor, error: Tensor, scale: float = 1.0) -> None:
        signs, magnitudes = self._signs(message).numpy(), self._magnitudes_in(message).numpy()
        kernels.split(signs, self._sizes, magnitudes, vector.numpy(), error.numpy(), scale)
