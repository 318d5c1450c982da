"""One bit per element, its sign. It is decoded as the mean of the elements with that sign (Seide et al. 2014).

The paper computes means per column of a weight matrix; here, a column is a segment of fixed length of a flat vector.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nmt_train.distributed.codec.codec import Codec
from nmt_train.distributed.codec.finite import finite
from nmt_train.distributed.message import Message

COLUMN = 512  # number of elements that share two means


class OneBit(Codec):
    """A message holds, for each column, the mean of its negative elements and the mean of the others, and all signs."""

    def encode(self, vector: Tensor, update: int) -> Message:
        columns = _columns(vector)
        there = _columns(torch.ones_like(vector))
        above = (columns >= 0) * there
        means = torch.stack([_mean(columns, there - above), _mean(columns, above)])
        finite(means)
        bits = np.packbits((vector >= 0).to(torch.uint8).cpu().numpy())
        return Message((), (means.flatten(), torch.from_numpy(bits)))

    def encode_shape(self, vector: Tensor) -> Message:
        elements = vector.numel()
        bits = vector.new_empty(-(-elements // 8), dtype=torch.uint8)
        return Message((), (vector.new_empty(2 * -(-elements // COLUMN)), bits))

    def decode(self, message: Message, into: Tensor) -> None:
        columns = -(-into.numel() // COLUMN)
        means, bits = message.vectors((torch.float32, 2 * columns), (torch.uint8, -(-into.numel() // 8)))
        low, high = means.to(into).view(2, -1).repeat_interleave(COLUMN, dim=1)[:, : into.numel()]
        above = torch.from_numpy(np.unpackbits(bits.cpu().numpy(), count=into.numel())).to(into.device)
        torch.where(above.bool(), high, low, out=into)


def _columns(vector: Tensor) -> Tensor:
    """Reshape to (columns, COLUMN), padded with zeros."""
    return torch.nn.functional.pad(vector, (0, -vector.numel() % COLUMN)).view(-1, COLUMN)


def _mean(columns: Tensor, chosen: Tensor) -> Tensor:
    return (columns * chosen).sum(1) / chosen.sum(1).clamp_(min=1)
