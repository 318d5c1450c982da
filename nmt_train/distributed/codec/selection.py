"""Selects the largest elements of a vector: exactly, or by a threshold estimated on a sample (Aji & Heafield 2017)."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from nmt_train.distributed.codec.finite import finite

_BLOCK = 1 << 20  # elements per NumPy call: every call may have to wait for the interpreter lock, so there should be few
_STRIDE = 17  # of a sample of a row; odd, so that it does not always hit the same columns of a matrix
_NEARLY = np.float32(0.9)  # the next vector is probably similar
_ROWS = 64  # that are looked at as a whole at the same time
_MOST_NEAR = 8  # the most candidates, as a multiple of `keep`; with more, the whole row is looked at


class Sample:
    """Samples `size` evenly spaced elements, whose positions shift with each update, so that in time all are sampled."""

    def __init__(self, size: int) -> None:
        self._size = size

    def threshold(self, vector: Tensor, count: int, update: int) -> float:
        """The magnitude that about `count` elements reach; infinite if the sample has NaN. `vector` must not be empty."""
        places = self.places(vector.numel(), update, vector.device)
        share = max(1, round(len(places) * count / vector.numel()))
        found = vector[places].abs_().topk(share).values[-1]
        return float(found) if not torch.isnan(found) else math.inf

    def places(self, elements: int, update: int, device: torch.device | None = None) -> Tensor:
        """The positions of a sample of a vector."""
        sample = min(self._size, elements)
        return (torch.arange(sample, device=device) * elements // sample + 7919 * (update + 1)) % elements


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


class LargestOfRows:
    """The `keep` largest elements of every row of a matrix; on the CPU, of equal ones those with the lowest positions.

    There, it first looks for the elements that reach nearly the magnitude of the last sent one of the previous call, which
    is several times faster than torch's `topk`. What it remembers changes only its speed.
    """

    def __init__(self, keep: int) -> None:
        self._keep, self._near = keep, np.empty(0, np.float32)

    def find(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Positions and values, each (rows * keep,), in `rows` (rows, columns); positions count over all rows, and ascend.

        Raises NotFinite if one of the values is not finite.
        """
        if not rows.is_cuda:
            places, values = self._on_cpu(rows.numpy())
            return torch.from_numpy(places), torch.from_numpy(values)
        magnitudes, columns = rows.abs().topk(self._keep, dim=1)
        finite(magnitudes)  # NaN counts as the largest
        first = torch.arange(len(rows), device=rows.device)[:, None] * rows.shape[1]
        positions = (columns.sort(1).values + first).flatten()
        return positions, rows.reshape(-1)[positions]

    def _on_cpu(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        count, columns = rows.shape
        if len(self._near) != count:
            self._near = _nearly(rows, self._keep)
        places, values = _not_below(rows, self._near)
        finite(torch.from_numpy(values))
        counts = np.diff(np.searchsorted(places, np.arange(count + 1) * columns))
        most = min(_MOST_NEAR * self._keep, max(2 * self._keep, columns // 4))
        good = (counts >= self._keep) & (counts <= most)  # otherwise the magnitude was no good guess
        if not good.all():
            kept = np.repeat(good, counts)
            places, values, counts = places[kept], values[kept], counts[good]
        inside = np.arange(counts.max(initial=self._keep)) < counts[:, None]
        candidates = np.full(inside.shape, -1, np.float32)
        candidates[inside] = np.abs(values)
        largest, self._near[good] = _largest_of_rows(candidates, self._keep)
        chosen = largest[inside]
        places, values = places[chosen], values[chosen]
        if not good.all():
            places, values = self._with_others(rows, np.flatnonzero(~good), places, values)
        self._near *= _NEARLY
        return places, values

    def _with_others(
        self, rows: np.ndarray, others: np.ndarray, places: np.ndarray, values: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Add the largest elements of the rows `others`, which are looked at as a whole."""
        found, there = [places], [values]
        for start in range(0, len(others), _ROWS):
            these = others[start : start + _ROWS]
            block = rows[these]
            chosen, self._near[these] = _largest_of_rows(np.abs(block), self._keep)
            row, column = np.nonzero(chosen)
            found.append(these[row] * rows.shape[1] + column)
            there.append(block[chosen])
        joined = np.concatenate(found)
        order = joined.argsort(kind="stable")  # fast for parts that ascend
        return joined[order], np.concatenate(there)[order]


def _nearly(rows: np.ndarray, keep: int) -> np.ndarray:
    """For every row, a magnitude that somewhat more than `keep` elements probably reach, from a sample."""
    sample = np.abs(rows[:, ::_STRIDE])
    rank = min(sample.shape[1], 2 + 2 * keep // _STRIDE)
    return np.partition(sample, sample.shape[1] - rank, axis=1)[:, -rank]


def _not_below(rows: np.ndarray, limits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ascending positions over all rows, and values, of elements that are NaN or not below the limit of their row."""
    columns = rows.shape[1]
    each = max(1, _BLOCK // 4 // columns)
    magnitude, small = np.empty((each, columns), np.float32), np.empty((each, columns), np.bool_)
    places, there = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
    for start in range(0, len(rows), each):
        block = rows[start : start + each]
        size = len(block)
        np.abs(block, out=magnitude[:size])
        np.less(magnitude[:size], limits[start : start + size, None], out=small[:size])
        found = np.flatnonzero(np.logical_not(small[:size], out=small[:size]))
        there.append(block.ravel()[found])  # while the block is in the cache
        found += start * columns
        places.append(found)
    return np.concatenate(places), np.concatenate(there)


def _largest_of_rows(magnitudes: np.ndarray, keep: int) -> tuple[np.ndarray, np.ndarray]:
    """Which elements (rows, width) are the `keep` largest of their row, and the smallest of these (rows,)."""
    width = magnitudes.shape[1]
    least = np.partition(magnitudes, width - keep, axis=1)[:, width - keep].copy()
    chosen = magnitudes >= least[:, None]
    tied = np.flatnonzero(np.count_nonzero(chosen, axis=1) > keep)
    if len(tied):
        larger, equal = magnitudes[tied] > least[tied, None], magnitudes[tied] == least[tied, None]
        needed = keep - larger.sum(1, keepdims=True)
        chosen[tied] = larger | (equal & (np.cumsum(equal, axis=1) <= needed))
    return chosen, least
