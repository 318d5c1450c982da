"""Selects the largest elements of a vector: exactly, or by a threshold estimated on a sample (Aji & Heafield 2017)."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from nmt_train.codec.finite import finite
from nmt_train.codec.selection_kernels import largest_of_rows, not_below

SAMPLE = 10_000  # elements from which a threshold is estimated
_BLOCK = 1 << 18  # elements; what the loop remembers of a block fits in the cache


class Sample:
    """Samples `size` evenly spaced elements, whose positions shift with each update, so that in time all are sampled."""

    def __init__(self, size: int = SAMPLE) -> None:
        self.size = size

    def threshold(self, vector: Tensor, count: int, update: int) -> float:
        """The magnitude that about `count` elements reach; infinite if the sample has NaN. `vector` must not be empty."""
        places = self.places(vector.numel(), update, vector.device)
        share = max(1, round(len(places) * count / vector.numel()))
        found = vector[places].abs_().topk(share).values[-1]
        return float(found) if not torch.isnan(found) else math.inf

    def places(self, elements: int, update: int, device: torch.device | None = None) -> Tensor:
        """The positions of a sample of a vector."""
        sample = min(self.size, elements)
        return (torch.arange(sample, device=device) * elements // sample + 7919 * (update + 1)) % elements


def reaching(vector: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Ascending positions, and values, of the elements whose magnitude is not below the threshold. NaN counts as large, so
    that callers can detect it.
    """
    if not vector.is_cpu:
        positions = (~(vector.abs() < threshold)).nonzero().flatten()
        return positions, vector[positions]
    if vector.dtype != torch.float32:
        raise TypeError(f"a vector of {vector.dtype}")
    bits, limit = vector.numpy().view(np.int32), int(np.float32(threshold).view(np.int32))
    found, places, flags = [np.empty(0, np.int64)], np.empty(_BLOCK, np.int64), np.empty(_BLOCK, np.uint8)
    for start in range(0, len(bits), _BLOCK):
        count = not_below(bits[start : start + _BLOCK], limit, flags, places)
        found.append(places[:count] + start)
    positions = torch.from_numpy(np.concatenate(found))
    return positions, vector[positions]


def exactly(positions: Tensor, values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Positions and values of the `count` largest elements, without zeros; the positions remain in ascending order."""
    magnitude = values.abs()
    magnitude[torch.isnan(magnitude)] = math.inf
    chosen = magnitude.topk(min(count, positions.numel())).indices
    chosen = chosen[magnitude[chosen] > 0].sort().values
    return positions[chosen], values[chosen]


class LargestOfRows:
    """The `keep` largest elements of every row of a matrix; on the CPU, of equal ones those with the lowest positions.

    There, it first looks for the elements that reach nearly the magnitude of the last sent one of the previous call. What it
    remembers changes only its speed.
    """

    def __init__(self, keep: int) -> None:
        self._keep, self._near = keep, np.empty(0, np.float32)

    def find(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Positions and values, each (rows * keep,), in `rows` (rows, columns); positions count over all rows, and ascend.

        Raises NotFinite if one of the values is not finite.
        """
        return self._on_cpu(rows) if rows.is_cpu else self._with_torch(rows)

    def _with_torch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        magnitudes, columns = rows.abs().topk(self._keep, dim=1)
        finite(magnitudes)  # NaN counts as the largest
        first = torch.arange(len(rows), device=rows.device)[:, None] * rows.shape[1]
        positions = (columns.sort(1).values + first).flatten()
        return positions, rows.reshape(-1)[positions]

    def _on_cpu(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        # Compiled code does not check this.
        if rows.dtype != torch.float32 or not rows.is_contiguous() or rows.shape[1] < self._keep:
            raise ValueError(f"{rows.dtype} {tuple(rows.shape)}, strides {rows.stride()}, of which {self._keep}")
        if len(self._near) != len(rows):
            self._near = np.zeros(len(rows), np.float32)
        positions = torch.empty(len(rows) * self._keep, dtype=torch.int64)
        values = torch.empty(len(rows) * self._keep)
        largest_of_rows(rows.numpy(), self._keep, self._near, positions.numpy(), values.numpy())
        finite(values)
        return positions, values
