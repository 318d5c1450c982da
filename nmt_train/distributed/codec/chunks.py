"""A vector by stretches that stay in a processor's cache, so that several passes over it cost little more than one."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

_BLOCK = 1 << 18  # elements


def blocks(vector: Tensor) -> Iterator[slice]:
    """On a GPU the whole vector at once."""
    size = max(1, vector.numel()) if vector.is_cuda else _BLOCK
    for start in range(0, vector.numel(), size):
        yield slice(start, start + size)
