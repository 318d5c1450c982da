"""The console command nmt-train; under mpirun it runs in a child process, otherwise (also under srun) in this process.

A tenth of a second after SIGINT or SIGTERM, mpirun kills the process that it started. This is too soon to save a checkpoint.
That process therefore only waits for a child; when mpirun kills it, the kernel signals the child, which saves a checkpoint.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from nmt_train import cli
from nmt_train.common import launcher
from nmt_train.launch.stop_request import PASSED_ON

_CHILD = "NMT_TRAIN_CHILD"
_PR_SET_PDEATHSIG = 1


def main() -> None:
    if not launcher.launched() or launcher.tasks() or _CHILD in os.environ or sys.platform != "linux":
        cli.run_rank(_train)
    sys.exit(cli.run(_watch))


def _train(arguments: Sequence[str]) -> int:
    from nmt_train.cli import train  # here, so that an error of an import is explained, too

    return train.command(arguments)


def _watch(arguments: Sequence[str]) -> int:
    """Run the command in a child, and return its exit status; if a signal ends the child, end by the same signal."""
    command = [sys.executable, "-P", "-m", "nmt_train.cli.train", *arguments]
    libc = ctypes.CDLL(None)
    child = subprocess.Popen(
        command, env={**os.environ, _CHILD: "1"}, start_new_session=True,
        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
    )  # fmt: skip
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # mpirun then sends SIGKILL, and the kernel sends SIGTERM to the child
    for number in PASSED_ON.values():
        signal.signal(number, lambda number, frame: child.send_signal(number))
    status = child.wait()
    if status < 0:  # End by the child's signal, so that mpirun sees that signal: an error status would end the whole job.
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    main()
