"""Selects the largest elements of a vector: exactly, or by a threshold estimated on a sample (Aji & Heafield 2017)."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

_BLOCK = 1 << 20  # elements per NumPy call: every call may have to wait for the interpreter lock, so there should be few


class Sample:
    """Samples `size` evenly spaced elements; the positions shift with each call, so that over time every element is sampled."""

    def __init__(self, size: int) -> None:
        self._size, self._shift = size, 0

    def threshold(self, vector: Tensor, count: int) -> float:
        """The magnitude that about `count` elements reach; infinite if the sample has NaN. `vector` must not be empty."""
        elements, sample = vector.numel(), min(self._size, vector.numel())
        self._shift = (self._shift + 7919) % elements
        places = (torch.arange(sample, device=vector.device) * elements // sample + self._shift) % elements
        share = max(1, round(sample * count / elements))
        found = vector[places].abs_().topk(share).values[-1]
        return float(found) if not torch.isnan(found) else math.inf


def reaching(vector: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Ascending positions, and values, of the elements whose magnitude is not below the threshold. NaN counts as large, so
    that callers can detect it.
    """
    if vector.is_cuda:
        positions = (~(vector.abs() < threshold)).nonzero().flatten()
        return positions, vector[positions]
    values, limit = vector.numpy(), np.float32(threshold)
    magnitude, small = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.bool_)
    found, there = [], []
    for start in range(0, len(values), _BLOCK):
        block = values[start : start + _BLOCK]
        above = np.less(np.abs(block, out=magnitude[: len(block)]), limit, out=small[: len(block)])
        places = np.flatnonzero(np.logical_not(above, out=above))
        there.append(block[places])  # while the block is in the cache
        places += start
        found.append(places)
    return torch.from_numpy(np.concatenate(found)), torch.from_numpy(np.concatenate(there))


def exactly(positions: Tensor, values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Positions and values of the `count` largest elements, without zeros; the positions remain in ascending order."""
    magnitude = values.abs()
    magnitude[torch.isnan(magnitude)] = math.inf
    chosen = magnitude.topk(min(count, positions.numel())).indices
    chosen = chosen[magnitude[chosen] > 0].sort().values
    return positions[chosen], values[chosen]
