"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path

from nmt_train.common.errors import UserError


def home() -> Path | None:
    """The user's home folder, which need not exist; None for a user without HOME and without an entry in the user database."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def user_cache() -> Path | None:
    """The folder of nmt_train in the user's cache folder (XDG_CACHE_HOME, or ~/.cache); None if there is no home folder."""
    configured, own = os.environ.get("XDG_CACHE_HOME"), home()
    if configured:
        return Path(configured) / "nmt_train"
    return None if own is None else own / ".cache" / "nmt_train"


def expanded(path: str | Path) -> Path:
    """`path` with the home folder instead of a leading `~` or `~user`. Raises UserError if it is not known."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{path}: the home folder is not known, or there is no such user; write the whole path") from None
