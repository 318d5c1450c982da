"""Exceptions for errors that a user can fix; the console commands print the message and exit with the `status`."""

from __future__ import annotations

import os

TRY_AGAIN = 75  # the exit status if a restart may help: EX_TEMPFAIL of sysexits.h


class UserError(Exception):
    """An error whose message says in one sentence what is wrong, where (file, line, key, host) and what to do."""

    status = 2


class NotFinite(UserError):
    """A loss or a gradient is infinite or not a number; the message says in which update and batch."""


def unreadable(path: str | os.PathLike[str], error: Exception) -> str:
    """Return a message that says what is wrong with a file; for a relative path, it also gives the absolute path."""
    path = os.path.expanduser(path)
    where = "" if os.path.isabs(path) else f" ({os.path.abspath(path)})"
    return f"{path}: {getattr(error, 'strerror', None) or error}{where}"
