"""A file as a read-only array in memory. Unlike with np.memmap, no file descriptor stays open: a run may have many corpora."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


def mapped(path: Path, dtype: str | type[np.generic]) -> np.ndarray:
    """The content of a file as an array (elements,). Raises OSError, or ValueError if it is not a number of whole elements."""
    return np.asarray(_Mapping(path, np.dtype(dtype)))


class _Mapping:
    """Memory that holds a file for as long as an array uses it."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self._size = 0
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not size or size % dtype.itemsize:
                raise ValueError(f"{path.name} has {size} bytes")
            # Private, because some file systems in user space cannot share memory; nobody writes to it anyway.
            self._address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_PRIVATE, file.fileno(), 0)
        if self._address == _FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
        self._size = size
        count = size // dtype.itemsize
        self.__array_interface__ = {"data": (self._address, True), "shape": (count,), "typestr": dtype.str, "version": 3}

    def __del__(self) -> None:
        if self._size:
            _libc.munmap(self._address, self._size)
