"""Compiles loops over the elements of arrays with numba. The first call takes seconds; the machine code stays on disk.

Arguments are numbers and NumPy arrays, and all calls of a function must have arguments of the same types: `float(scale)`, not
sometimes an integer. Otherwise it is compiled several times, and what two processes compile at the same time may be mixed up on
disk. Compiled code does not check bounds.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from nmt_train.common.paths import user_cache
from nmt_train.common.processor import processor

Function = TypeVar("Function", bound=Callable[..., object])

_ANY_ORDER = {"reassoc", "nsz"}  # what compilers may assume of sums


def _folder() -> str:
    """The folder of the machine code in the user's cache folder; empty if there is none: then it is kept beside the source.

    Each version of the compiled functions has a folder of its own: numba sees whether the file of a function has changed, but
    not what the function calls in other files. So has each type of processor, because machines may share the user's folder.
    """
    version = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        source = path.read_bytes()
        if b"nmt_train.common.compiled" in source or path == Path(__file__):
            version.update(source)
    cache = user_cache()
    return "" if cache is None else str(cache / "compiled" / f"{version.hexdigest()[:16]}-{processor()}")


def compiled(function: Function) -> Function:
    """The function as machine code."""
    return cast(Function, _Compiled(function, set()))


def compiled_sums(function: Function) -> Function:
    """The same for a function that may add up its sums in any order, so that their last bits depend on the processor."""
    return cast(Function, _Compiled(function, _ANY_ORDER))


def part_of_sums(function: Function) -> Function:
    """A part of functions with `compiled_sums`, compiled again in each of them. Otherwise, its sums would be rounded in one way
    when the machine code is new, and in another one when it comes from the disk.
    """
    return cast(Function, _Compiled(function, _ANY_ORDER, inline=True))


class _Compiled:
    """A function that is compiled when it is called first: importing numba takes half a second, and few commands need it."""

    def __init__(self, function: Callable[..., object], relaxed: set[str], inline: bool = False) -> None:
        self._function, self._relaxed, self._inline = function, relaxed, inline

    def __call__(self, *arguments: object) -> object:
        return self._machine_code(*arguments)

    @cached_property
    def _machine_code(self) -> Any:
        import numba

        known = self._function.__globals__
        for name in self._function.__code__.co_names:
            if isinstance(part := known.get(name), _Compiled):
                known[name] = part._machine_code  # numba can compile calls of its own functions only
        numba.config.CACHE_DIR = numba.config.CACHE_DIR or _folder()  # type: ignore[attr-defined]
        made = partial(numba.njit, self._function, nogil=True, error_model="numpy", fastmath=self._relaxed)
        return made(inline="always") if self._inline else _kept_on_disk(made)


def _kept_on_disk(made: Callable[..., Any]) -> Any:
    try:
        result = made(cache=True)
    except RuntimeError:  # no folder is writable
        return made()
    save = result._cache.save_overload

    def save_if_possible(*arguments: object) -> None:
        with contextlib.suppress(OSError):  # the disk is full: the next process compiles again
            save(*arguments)

    result._cache.save_overload = save_if_possible
    return result


# The top six bits of a product with this number are different for each power of two.
_DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
_ZEROS = np.zeros(64, np.int64)
for _zeros in range(64):
    _ZEROS[(int(_DE_BRUIJN) << _zeros) % 2**64 >> 58] = _zeros


@compiled
def zeros_below(power: np.uint64) -> int:
    """The exponent of a power of two."""
    return int(_ZEROS[(power * _DE_BRUIJN) >> np.uint64(58)])
