"""Sends elements that reach a threshold, as plus or minus the threshold; needs error feedback (Strom 2015, 2.4 to 2.6)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nmt_train.codec import integer_coding as bits
from nmt_train.codec.codec import Codec
from nmt_train.codec.config import CodecConfigs, ThresholdConfig
from nmt_train.codec.finite import finite
from nmt_train.codec.selection import Sample, reaching
from nmt_train.common.message import Message

GRAIN = 2.0**-30  # thresholds are multiples of this, so that sums do not depend on the order of addition
_LOW = 0x7FFF_FFFF  # mask of the position in a 32-bit word; the highest bit is the sign


class StromThreshold(Codec):
    """A message holds the threshold, and the position and sign of each element that reached it: in a word of 32 bits (31 for
    the position), or as a Golomb-Rice code of the gap and a sign bit. Its only number is the count of these elements.
    """

    def __init__(self, config: ThresholdConfig) -> None:
        self._config, self._sample = config, Sample()

    @classmethod
    def build(cls, configs: CodecConfigs, dropped: float) -> StromThreshold:
        return cls(configs.threshold)

    def encode(self, vector: Tensor, update: int) -> Message:
        tau = self._tau(vector, update)
        positions, values = reaching(vector, tau) if vector.numel() else (vector.new_empty(0, dtype=torch.int64), vector)
        finite(values)
        places, negative = positions.cpu().numpy(), (values < 0).cpu().numpy()
        if self._config.coding == "words":
            word = (places | np.left_shift(negative.astype(np.int64), 31)).astype(np.uint32).view(np.int32)
            return Message((len(places),), (torch.tensor([tau]), torch.from_numpy(word)))
        gaps = np.diff(places, prepend=-1) - 1
        code = np.concatenate([bits.rice(gaps, bits.rice_width(len(places) / max(1, vector.numel()))), np.packbits(negative)])
        return Message((len(places),), (torch.tensor([tau]), torch.from_numpy(code)))

    def _tau(self, vector: Tensor, update: int) -> float:
        tau = self._config.tau
        if tau is None:
            count = max(1, round(vector.numel() * self._config.density))
            tau = self._sample.threshold(vector, count, update) if vector.numel() else GRAIN
            finite(torch.tensor(tau))
        return float(np.float32(max(1, round(tau / GRAIN)) * GRAIN))

    def encode_shape(self, vector: Tensor) -> Message:
        count = round(vector.numel() * self._config.density)
        width = bits.rice_width(self._config.density)
        each = 4.0 if self._config.coding == "words" else (width + 1 + 1.5) / 8  # unary parts take about 1.5 bits
        return Message((count,), (vector.new_empty(1), vector.new_empty(round(count * each), dtype=torch.uint8)))

    def decode(self, message: Message, into: Tensor) -> None:
        into.zero_()
        self.add(message, into)

    def add(self, message: Message, into: Tensor, scale: float = 1.0) -> None:
        with message.understood():
            positions, signs = self._unpacked(message, into.numel())
            if len(positions) and not 0 <= positions.min() <= positions.max() < into.numel():
                raise ValueError(f"a position beyond {into.numel()} elements")
        tau = float(message.tensors[0])
        into.index_add_(0, torch.from_numpy(positions).to(into.device), torch.from_numpy(signs).to(into), alpha=scale * tau)

    def _unpacked(self, message: Message, elements: int) -> tuple[np.ndarray, np.ndarray]:
        """The positions of the elements, and their signs as 1 or -1."""
        count = message.number()
        if not 0 <= count <= elements:
            raise ValueError(f"{count} elements selected of {elements}")
        if self._config.coding == "words":
            words = message.vectors((torch.float32, 1), (torch.int32, count))[1]
            word = words.cpu().numpy().view(np.uint32).astype(np.int64)
            return word & _LOW, 1 - 2 * (word >> 31)
        packed = message.vectors((torch.float32, 1), (torch.uint8, None))[1].cpu().numpy()
        held = -(-count // 8)
        code, negative = packed[: len(packed) - held], packed[len(packed) - held :]
        gaps = bits.from_rice(code, count, bits.rice_width(count / max(1, elements)))
        signs = 1 - 2 * np.unpackbits(negative, count=count).astype(np.int64)
        return np.cumsum(gaps + 1) - 1, signs
