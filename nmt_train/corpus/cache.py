"""The folder of tokenized corpora that all runs of a user share: its place, its bound in size, and how it is emptied."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from nmt_train.common.paths import expanded

SUFFIX = ".store"
_ABANDONED = 24 * 3600.0  # seconds after the last change of a store that is being built: its process has ended
READY = "store.json"  # in a folder that is complete; processes that use it lock this file


def folder(configured: str | None) -> Path:
    """The configured folder, or nmt_train in the user's cache folder (XDG_CACHE_HOME, or ~/.cache)."""
    if configured is not None:
        return expanded(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or expanded("~/.cache")) / "nmt_train"


def hold(store: Path) -> BinaryIO:
    """Mark a store as used now, and protect it from removal as long as the returned file is open.

    Raises FileNotFoundError if another process has just removed the store.
    """
    file = open(store / READY, "rb")
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FileNotFoundError(store / READY) from None
    except OSError:  # a file system without locks
        pass
    with suppress(OSError):  # a store that only others may write
        os.utime(store / READY)
    if not (store / READY).exists():
        raise FileNotFoundError(store / READY)
    return file


def make_room(cache: Path, most: float) -> None:
    """Remove the stores that were used longest ago, until those in `cache` have at most `most` bytes; those in use stay."""
    _remove_abandoned(cache)
    stores = sorted(_stores(cache))
    total = sum(size for _, size, _ in stores)
    for _, size, path in stores:
        if total > most and _removed(path):
            total -= size


def empty(cache: Path) -> tuple[int, int]:
    """Remove all stores that no process uses; return how many were removed, and their bytes."""
    _remove_abandoned(cache)
    removed = [size for _, size, path in _stores(cache) if _removed(path)]
    return len(removed), sum(removed)


def _stores(cache: Path) -> Iterator[tuple[float, int, Path]]:
    """Yield the time of the last use, the bytes and the path of every store."""
    for path in cache.glob(f"*{SUFFIX}"):
        with suppress(OSError):  # another process has just removed it
            yield (path / READY).stat().st_mtime, sum(file.stat().st_size for file in path.iterdir()), path


def _remove_abandoned(cache: Path) -> None:
    """Remove stores whose process was killed while it built or removed them."""
    for path in cache.glob(f".*{SUFFIX}.*"):
        with suppress(OSError):
            last = max(file.stat().st_mtime for file in (path, *path.iterdir()))
            if time.time() - last > _ABANDONED:
                shutil.rmtree(path)


def _removed(store: Path) -> bool:
    """Remove a store, unless a process uses it; returns whether it was removed."""
    with suppress(OSError), open(store / READY, "r+b") as file:  # NFS locks exclusively only what is open for writing
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        hidden = store.with_name(f".{store.name}.removed")
        shutil.rmtree(hidden, ignore_errors=True)  # left by a process that was killed here
        store.rename(hidden)  # at once: whoever looks for it now builds it again
        shutil.rmtree(hidden)
        return True
    return False
