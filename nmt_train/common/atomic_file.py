"""Files that are replaced whole: whenever the process or the machine dies, they are as before or as they were to be."""

from __future__ import annotations

import os
from pathlib import Path


def write(path: Path, data: bytes) -> None:
    """Put `data` in the place of a file, or make one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def replace(beside: Path, path: Path) -> None:
    """Rename what is on the disk, or a link, to its place for good."""
    beside.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
