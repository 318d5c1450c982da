"""Exceptions for errors that a user can fix; the console commands print the message and exit with the `status`."""

from __future__ import annotations

import errno
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


_PATH = "check the path"
_UNABLE = "its file system cannot do this: use another disk"
# What to do about an error of the operating system, by its errno.
_REMEDIES = {
    errno.ENOSPC: "free some space on its disk",
    errno.EDQUOT: "the quota on its disk is used up: free some space, or ask for more",
    errno.EFBIG: "its file system or `ulimit -f` allows no file of this size: use another disk, or raise the limit",
    errno.EACCES: "check its permissions and those of its folder",
    errno.EPERM: "check its permissions, and whether its file system can do this",
    errno.EROFS: "its file system is read-only: use another one",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.EINVAL: "its file system does not accept this name or operation: use another name or disk",
    errno.ENOTSUP: _UNABLE,
    errno.ENOSYS: _UNABLE,
    errno.ENODEV: _UNABLE,
    errno.ENOLCK: _UNABLE,
    errno.ENOENT: _PATH,  # in the middle of a command, which looks for its own inputs before
    errno.ENOTDIR: _PATH,
    errno.EISDIR: _PATH,
    errno.ELOOP: f"{_PATH}: its links form a loop",
    errno.EBADF: "do not close standard input and output",
    errno.EMFILE: "raise the limit of open files per process (`ulimit -n`)",
    errno.EIO: "check whether its disk is damaged (`dmesg`)",
    errno.ENXIO: "check whether its disk is still connected",
}
# The same for errors that may not occur at the next start.
_TEMPORARY = {
    errno.ENFILE: "end other programs, which have too many files open",
    errno.EAGAIN: "end other programs, or raise the limit of processes (`ulimit -u`)",
    errno.EBUSY: "end the program that uses it",
    errno.ETXTBSY: "end the program that uses it",
    errno.ESTALE: "check its file server",
    errno.ENOTCONN: "mount its network file system again",
    errno.EHOSTDOWN: "check its file server",
    errno.ETIMEDOUT: "check its file server",
}


def remedy(error: Exception, otherwise: str = "check the path and its disk") -> str:
    """What to do about an error of the operating system; `otherwise` for any other error."""
    number = getattr(error, "errno", None)
    if number in _TEMPORARY:
        return f"{_TEMPORARY[number]}, then start the same command again"
    return _REMEDIES.get(number or 0, otherwise)


def status_of(error: OSError) -> int:
    """The exit status of an error of the operating system; 1 if there is no remedy."""
    return TRY_AGAIN if error.errno in _TEMPORARY else UserError.status if error.errno in _REMEDIES else 1
