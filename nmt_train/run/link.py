"""Links of a run to its checkpoints. On a file system without symbolic links, a file holds the path instead, as in git."""

from __future__ import annotations

import re
from pathlib import Path

from nmt_train.common import atomic_file as durable

_PATH = re.compile(r"(checkpoints|best)/[0-9]{1,19}")
_LONGEST = 40  # bytes


def point(link: Path, target: Path) -> bool:
    """Point a link to a folder below its own, atomically. Returns False if the file system has no symbolic links."""
    path = target.relative_to(link.parent)
    beside = link.with_name(f".{link.name}.tmp")
    beside.unlink(missing_ok=True)
    try:
        beside.symlink_to(path)
    except OSError:  # which one depends on the file system; if it is another problem, writing a file has it, too
        durable.write(link, f"{path.as_posix()}\n".encode())
        return False
    durable.replace(beside, link)
    return True


def is_link(path: Path) -> bool:
    """Whether this is a symbolic link, or a file in place of one."""
    return path.is_symlink() or _named(path) is not None


def followed(path: Path) -> Path:
    """The folder that a file names in place of a symbolic link; any other path as it is."""
    return _named(path) or path


def _named(path: Path) -> Path | None:
    if not path.is_file() or path.stat().st_size > _LONGEST:
        return None
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    return path.resolve().parent / text if _PATH.fullmatch(text) else None
