"""Paths as users write them."""

from __future__ import annotations

from pathlib import Path

from nmt_train.common.errors import UserError


def expanded(path: str | Path) -> Path:
    """`path` with the home folder instead of a leading `~` or `~user`. Raises UserError if it is not known."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{path}: the home folder is not known, or there is no such user; write the whole path") from None
