"""Compiles loops over the elements of arrays with numba. The first call takes seconds; the machine code stays on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba
import numpy as np

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """The function as machine code. It must not be called with types other than numbers and NumPy arrays."""
    return _compiled(function, set())


def compiled_sums(function: Function) -> Function:
    """The same for a function that may add up its sums in any order, so that their last bits depend on the processor."""
    return _compiled(function, {"reassoc", "nsz"})


def _compiled(function: Function, relaxed: set[str]) -> Function:
    def made(on_disk: bool) -> Function:
        return cast(Function, numba.njit(function, cache=on_disk, nogil=True, error_model="numpy", fastmath=relaxed))

    try:
        return made(on_disk=True)
    except RuntimeError:  # no folder for machine code is writable
        return made(on_disk=False)


# The top six bits of a product with this number are different for each power of two.
_DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
_ZEROS = np.zeros(64, np.int64)
for _zeros in range(64):
    _ZEROS[(int(_DE_BRUIJN) << _zeros) % 2**64 >> 58] = _zeros


@compiled
def zeros_below(power: np.uint64) -> int:
    """The exponent of a power of two."""
    return int(_ZEROS[(power * _DE_BRUIJN) >> np.uint64(58)])
