"""The console command nmt-train: in this process, which srun may have started, or, under mpirun, in a child of it.

mpirun kills the process that it knows a tenth of a second after SIGINT or SIGTERM, too soon to save; so that process only waits
for a child, which is told by the kernel when that happens, and saves.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

from nmt_train.common import launcher

_CHILD = "NMT_TRAIN_CHILD"
_PR_SET_PDEATHSIG = 1


def main() -> None:
    if not launcher.launched() or launcher.tasks() or _CHILD in os.environ or sys.platform != "linux":
        from nmt_train.cli import train

        train.main()
        return
    command = [sys.executable, "-P", "-m", "nmt_train.cli.train", *sys.argv[1:]]
    libc = ctypes.CDLL(None)
    child = subprocess.Popen(
        command, env={**os.environ, _CHILD: "1"}, start_new_session=True,
        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
    )  # fmt: skip
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # SIGKILL follows, and tells the child
    signal.signal(signal.SIGUSR1, lambda number, frame: child.send_signal(number))
    status = child.wait()
    if status < 0:  # by a signal, as mpirun must see it: one that exits with an error ends the whole job
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main()
