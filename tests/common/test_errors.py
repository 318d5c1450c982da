"""Errors of the operating system: what a user reads about each of them, and the exit status."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

import pytest

from nmt_train import cli
from nmt_train.common.errors import TRY_AGAIN, remedy

PATH, AGAIN = "check the path", ", then start the same command again"


@pytest.mark.parametrize(
    ("number", "status", "advice"),
    [
        (errno.ENOSPC, 2, "free some space on its disk"),
        (errno.EDQUOT, 2, "the quota on its disk is used up: free some space, or ask for more"),
        (errno.EFBIG, 2, "its file system or `ulimit -f` allows no file of this size: use another disk, or raise the limit"),
        (errno.EACCES, 2, "check its permissions and those of its folder"),
        (errno.EPERM, 2, "check its permissions, and whether its file system can do this"),
        (errno.EROFS, 2, "its file system is read-only: use another one"),
        (errno.ENAMETOOLONG, 2, "use a shorter name"),
        (errno.EINVAL, 2, "its file system does not accept this name or operation: use another name or disk"),
        (errno.EOPNOTSUPP, 2, "its file system cannot do this: use another disk"),
        (errno.ENOSYS, 2, "its file system cannot do this: use another disk"),
        (errno.ENODEV, 2, "its file system cannot do this: use another disk"),
        (errno.ENOENT, 2, PATH),
        (errno.ENOTDIR, 2, PATH),
        (errno.EISDIR, 2, PATH),
        (errno.ELOOP, 2, f"{PATH}: its links form a loop"),
        (errno.EBADF, 2, "do not close standard input and output"),
        (errno.EMFILE, 2, "raise the limit of open files per process (`ulimit -n`)"),
        (errno.EIO, 2, "check whether its disk is damaged (`dmesg`)"),
        (errno.ENFILE, TRY_AGAIN, f"end other programs, which have too many files open{AGAIN}"),
        (errno.EAGAIN, TRY_AGAIN, f"end other programs, or raise the limit of processes (`ulimit -u`){AGAIN}"),
        (errno.EBUSY, TRY_AGAIN, f"end the program that uses it{AGAIN}"),
        (errno.ESTALE, TRY_AGAIN, f"check its file server{AGAIN}"),
        (errno.ENOTCONN, TRY_AGAIN, f"mount its network file system again{AGAIN}"),
        (errno.ETIMEDOUT, TRY_AGAIN, f"check its file server{AGAIN}"),
    ],
)
def test_the_advice_and_the_status_fit_the_error(
    number: int, status: int, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(arguments: Sequence[str]) -> int:
        raise OSError(number, os.strerror(number), "here")

    assert cli.run(command, []) == status
    assert capsys.readouterr().err == f"error: here: {os.strerror(number)}; {advice}\n"


def test_an_error_that_no_file_system_raises_is_our_own_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    def command(arguments: Sequence[str]) -> int:
        raise OSError(errno.EDOM, os.strerror(errno.EDOM))

    assert cli.run(command, []) == 1
    assert "internal error: OSError" in capsys.readouterr().err
    assert remedy(OSError(errno.EDOM, "")) == "check the path and its disk"
