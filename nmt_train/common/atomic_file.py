"""Atomic file replacement: if the process or the machine dies, a file has either its old content or its new content."""

from __future__ import annotations

import os
from pathlib import Path


def write(path: Path, data: bytes) -> None:
    """Atomically replace the content of a file with `data`; create the file if it does not exist."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        replace(beside, path)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise


def replace(beside: Path, path: Path) -> None:
    """Rename a file whose data is on the disk, or a link, to `path`, and sync the folder so that the rename is durable."""
    beside.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until the data of a file, or the directory entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
