"""Atomic file replacement: if the process or the machine dies, a file has either its old content or its new content."""

from __future__ import annotations

import errno
import functools
import os
from pathlib import Path

from nmt_train.common.streams import tell

# Errors of a file system that cannot sync a file or a folder, as many network file systems and FUSE.
_UNABLE = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EISDIR})


def write(path: Path, data: bytes) -> None:
    """Atomically replace the content of a file with `data`; create the file if it does not exist."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(beside, "wb") as file:
            file.write(data)
        sync(beside)
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
    """Wait until the data of a file, or the directory entries of a folder, are on the disk, if the file system can do this."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _UNABLE:
            raise
        unable(error.strerror or "")


@functools.cache
def unable(reason: str) -> None:
    """Warn, once per process, that files are written without waiting for the disk."""
    tell(f"warning: this file system cannot sync files or folders ({reason}): a power failure may damage what was written last")
