"""The folder of tokenized corpora that all runs of a user share: its place, its bound in size, and how it is emptied."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

SUFFIX = ".store"
READY = "store.json"  # in a folder that is complete; processes that use it lock this file


def folder(configured: str | None) -> Path:
    """The configured folder, or nmt_train in the user's cache folder (XDG_CACHE_HOME, or ~/.cache)."""
    if configured is not None:
        return Path(configured).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nmt_train"


def hold(store: Path) -> BinaryIO:
    """Mark a store as used now, and protect it from removal as long as the returned file is open."""
    file = open(store / READY, "rb")
    with suppress(OSError):  # a folder that only others may write, or a file system without locks
        os.utime(store / READY)
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return file


def make_room(cache: Path, most: float) -> None:
    """Remove the stores that were used longest ago, until those in `cache` have at most `most` bytes; those in use stay."""
    stores = sorted(_stores(cache), key=lambda path: (path / READY).stat().st_mtime)
    sizes = {path: _size(path) for path in stores}
    for path in stores:
        if sum(sizes.values()) <= most:
            return
        if _removed(path):
            del sizes[path]


def empty(cache: Path) -> tuple[int, int]:
    """Remove all stores that no process uses; return how many were removed, and their bytes."""
    removed = [size for path in _stores(cache) if (size := _size(path)) and _removed(path)]
    return len(removed), sum(removed)


def _stores(cache: Path) -> Iterator[Path]:
    yield from (path for path in cache.glob(f"*{SUFFIX}") if (path / READY).exists())


def _size(store: Path) -> int:
    return sum(file.stat().st_size for file in store.iterdir())


def _removed(store: Path) -> bool:
    """Remove a store, unless a process uses it; returns whether it was removed."""
    with suppress(OSError), _alone(store):
        shutil.rmtree(store)
        return True
    return False


@contextmanager
def _alone(store: Path) -> Iterator[None]:
    """Raise OSError if a process holds the store."""
    with open(store / READY, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
