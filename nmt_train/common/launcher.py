"""Reads the environment variables that the launcher (mpirun, srun) sets for this process."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from nmt_train.common.errors import UserError

# In the environment of a job that `nmt-train --restarts` has started again: whether its run had begun before.
RESTARTED, BEGUN, NOT_BEGUN = "NMT_TRAIN_RESTARTED", "begun", "not-begun"
UNBOUND = "NMT_TRAIN_UNBOUND"  # in the environment of ranks that were started without being bound to cores
LINGER = 3.0  # seconds that a rank waits before it exits because of another rank's error
_LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE")
_OURS = ("mpirun", "mpiexec", "prterun", "orterun", "nmt-train", "nmt_train.cli.entry", "nmt_train.cli.train")
_MPIRUN = ("OMPI_COMM_WORLD_SIZE", "MPI_LOCALRANKID")  # set by Open MPI and by MPICH, also inside a Slurm job


def launched() -> bool:
    """Whether an MPI launcher started this process as a rank. A single task of srun does not count: it may start ranks."""
    return tasks() > 1 if tasks() else any(map(os.environ.get, _LAUNCHED))


def tasks() -> int:
    """The number of tasks that srun started, including this one; 0 if something else started this process."""
    return 0 if any(map(os.environ.get, _MPIRUN)) else _number("SLURM_STEP_NUM_TASKS")


def refuse_torchrun() -> None:
    """Raise UserError if torchrun started this process as one of several, which would not know of each other."""
    started = os.environ.get("TORCHELASTIC_RUN_ID") and not any(map(os.environ.get, _MPIRUN))
    if not started or _number("WORLD_SIZE") < 2:
        return
    if _number("RANK"):
        wait_for_first_rank()  # which has the same error and prints it; torchrun then ends this process
    raise UserError(
        f"torchrun started {_number('WORLD_SIZE')} processes, but ranks of nmt_train find each other by MPI: start the command"
        " without torchrun, with --devices all for all GPUs of this machine or --hosts FILE for several machines, or by mpirun"
    )


def queued_again() -> bool:
    """Whether Slurm has requeued this job."""
    return _number("SLURM_RESTART_COUNT") > 0


def restarted() -> bool:
    """Whether this process belongs to a job that ended early and was restarted."""
    return RESTARTED in os.environ or queued_again()


def begun_before() -> bool:
    """Whether an earlier start of this job has begun its run."""
    return os.environ.get(RESTARTED) == BEGUN


def wait_for_first_rank() -> None:
    """Wait some seconds, in which the end of the machine's first rank would end this process, too."""
    # Launchers send SIGTERM after a rank has failed; the job should have the status of that rank's error.
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(UserError.status))
    time.sleep(LINGER)


def terminal() -> TextIO | None:
    """The terminal in which the command was typed, if its standard error is not redirected, also for a rank of mpirun.

    mpirun gives its ranks pipes and forwards what they write. The terminal of mpirun itself, or of the command that started it
    on this machine, is found by way of the parent processes.
    """
    if sys.stderr is None:  # the caller has closed it
        return None
    if sys.stderr.isatty():
        return sys.stderr
    process = os.getpid()
    with suppress(OSError, ValueError):
        while True:
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
            command = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
            if not any(Path(os.fsdecode(word)).name in _OURS for word in command[:4]):
                return None  # a shell, for example, whose terminal does not show what mpirun prints
            error = Path(f"/proc/{process}/fd/2")
            if error.is_char_device() and error.readlink() != Path(os.devnull):
                return open(error, "w", encoding="utf-8")
    return None


def local_rank() -> int:
    """This process's number among the processes that the launcher started on this machine; 0 without a launcher."""
    for name in ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"):
        if os.environ.get(name):
            return _number(name)
    return 0


def _number(name: str) -> int:
    """The value of an environment variable; 0 if it is not set, or holds no number, as in a job script that clears it."""
    value = os.environ.get(name, "")
    return int(value) if value.isascii() and value.isdecimal() else 0
