"""The folder of tokenized corpora and trained vocabularies that all runs of a user share: its place, its bound in size, and
how entries are found, built and removed. An entry is a folder, whose name identifies the content that it was made from.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import resource
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from nmt_train.common import atomic_file as durable
from nmt_train.common.errors import UserError, remedy, unreadable
from nmt_train.common.paths import expanded, user_cache
from nmt_train.corpus import CorpusPart, alignment, formats
from nmt_train.corpus.text import sides

Entry = TypeVar("Entry")

SUFFIX = ".store"
_WHOLE, _BLOCK, _BLOCKS = 1 << 26, 1 << 20, 64  # bytes, bytes, blocks: what the fingerprint of a file covers
_SHARE = 0.5  # of the space that would be free without the cache
_TEXT_PER_BYTE = 4  # bytes of text per byte of a compressed file, about
_MANY_FILES = 1 << 20  # enough; programs that a run starts may close every number up to the limit
_ABANDONED = 24 * 3600.0  # seconds after the last change of a store that is being built: its process has ended
READY = "store.json"  # in a folder that is complete; processes that use it lock this file


def folder(configured: str | None) -> Path | None:
    """The configured folder, or nmt_train in the user's cache folder; None if there is neither."""
    return expanded(configured) if configured is not None else user_cache()


def folders(configured: str | None, fallback: Path) -> list[Path]:
    """Where entries may be: in `folder`, if there is one, or in `fallback` if that cannot be written."""
    first = folder(configured)
    return [fallback] if first is None else [first, fallback]


def allow_many_files() -> None:
    """Raise this process's limit of open files as far as the system allows: each store in use keeps one open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def name(kind: str, made_from: Sequence[object]) -> str:
    """The name of the entry that is made from these facts (JSON)."""
    return f"{kind}.{hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:16]}{SUFFIX}"


def fingerprints(part: CorpusPart, key: str) -> list[list[object]]:
    """What identifies the text, the sentence weights and the alignments of a corpus, as JSON, wherever its files are.

    key: the configuration key of the corpus. Raises UserError if a file cannot be read.
    """
    lists = sides(part.files, key)
    if part.sentence_weights is not None:
        lists.append([] if part.sentence_weights == "column" else [os.path.expanduser(part.sentence_weights)])
    try:
        found = [list[object](map(_fingerprint, paths)) for paths in lists]
        if part.alignments is not None:
            found.append(["alignments", *map(_fingerprint, alignment.paths(part))])
        return found
    except OSError as error:
        raise UserError(f"{key}: {unreadable(error.filename, error)}; check the path") from None


def _fingerprint(path: str) -> list[object]:
    """The size of a file and a digest of its bytes. To read all of a large file would take minutes, so the digest of such a
    file covers evenly spaced blocks, and the time of its last change is added.
    """
    packed = bool(formats.suffix(path))
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_size <= _WHOLE:
            return [packed, status.st_size, hashlib.file_digest(file, "sha256").hexdigest()]
        digest = hashlib.sha256()
        for number in range(_BLOCKS):
            file.seek((status.st_size - _BLOCK) * number // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK))
    return [packed, status.st_size, digest.hexdigest(), status.st_mtime_ns]


def text_size(part: CorpusPart, key: str) -> int:
    """About how many bytes of text a corpus has; tokenized, it takes less. Raises OSError if a file cannot be read."""
    paths = [path for side in sides(part.files, key) for path in side] + alignment.paths(part)
    return sum(os.stat(path).st_size * (_TEXT_PER_BYTE if formats.suffix(path) else 1) for path in paths)


def find(folders: Sequence[Path], name: str, read: Callable[[Path], Entry]) -> Entry | None:
    """What `read` makes of the entry, or None if none of the folders has it."""
    for folder in folders:
        with suppress(OSError):  # there is none, or it cannot be read
            return read(folder / name)
    return None


def build(folders: Sequence[Path], name: str, read: Callable[[Path], Entry], write: Callable[[Path], None]) -> Entry:
    """Build an entry in the first of the folders that can be written, and return what `read` makes of it.

    write: fills a new folder; it writes the file READY last. Raises UserError if no folder can be written, or the disk is full.
    """
    for folder in folders:
        path = folder / name
        try:
            return read(path)  # another process may just have built it
        except FileNotFoundError:
            pass
        except OSError as error:  # it cannot be read
            reason = error
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
            building = folder / f".{name}.{secrets.token_hex(8)}"
            building.mkdir()  # with the permissions that the umask allows
        except OSError as error:
            reason = error
            continue
        try:
            write(building)
            _publish(building, path)
        except OSError as error:
            raise UserError(
                f"{path}: {error.strerror or error}; {remedy(error)}, or set corpus.cache to another folder"
            ) from None
        finally:
            shutil.rmtree(building, ignore_errors=True)
        return read(path)
    raise UserError(f"{folders[-1]}: {reason.strerror}; {remedy(reason)}, or set corpus.cache to another folder")


def _publish(building: Path, path: Path) -> None:
    """Rename a complete entry to its final path; if another run was faster, use its entry, which is identical."""
    for file in (*building.iterdir(), building):
        durable.sync(file)
    try:
        building.rename(path)
        durable.sync(path.parent)
    except OSError:
        if not (path / READY).exists():
            raise


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


def make_room(cache: Path, most: float, coming: int = 0) -> None:
    """Remove the stores that were used longest ago, until those in `cache` have at most `most` bytes; those in use stay.

    They never have more than half of the space that is free on their disk without them. coming: bytes that will be added.
    Raises OSError if there is no such folder.
    """
    _remove_abandoned(cache)
    stores = sorted(_stores(cache))
    total = sum(size for _, size, _ in stores)
    most = min(most, (total + shutil.disk_usage(cache).free) * _SHARE)
    for _, size, path in stores:
        if total + coming > most and _removed(path):
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
