"""Splits a vector into blocks that fit in a processor's cache, so that several passes cost little more than one."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

_BLOCK = 1 << 18  # elements


def blocks(vector: Tensor) -> Iterator[slice]:
    """The slices of all blocks of `vector`; on a GPU, one slice for the whole vector."""
    size = max(1, vector.numel()) if vector.is_cuda else _BLOCK
    for start in range(0, vector.numel(), size):
        yield slice(start, start + size)
