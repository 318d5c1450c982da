"""What the launcher of this process (mpirun, srun) says about it in the environment."""

from __future__ import annotations

import os

RESTARTED = "NMT_TRAIN_RESTARTED"  # is in the environment of a job that is started again
_LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE")
_MPIRUN = ("OMPI_COMM_WORLD_SIZE", "MPI_LOCALRANKID")  # Open MPI's and MPICH's set them, also inside a job of Slurm


def launched() -> bool:
    """Whether an MPI launcher (mpirun, srun) started this process as a rank. One task of srun is not: it may start ranks."""
    return tasks() > 1 if tasks() else any(name in os.environ for name in _LAUNCHED)


def tasks() -> int:
    """How many tasks srun started, of which this process is one; 0 where something else started it."""
    inside = any(name in os.environ for name in _MPIRUN)
    return 0 if inside else int(os.environ.get("SLURM_STEP_NUM_TASKS", 0))


def queued_again() -> bool:
    """Whether Slurm has started this job before."""
    return int(os.environ.get("SLURM_RESTART_COUNT", 0)) > 0


def restarted() -> bool:
    """Whether this process belongs to a job that ended before its time and was started again."""
    return RESTARTED in os.environ or queued_again()


def local_rank() -> int:
    """The number of this process among those of its machine, as the launcher gives it."""
    for name in ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"):
        if name in os.environ:
            return int(os.environ[name])
    return 0
