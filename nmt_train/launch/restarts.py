"""Restarts a job that ended early: it continues from its last checkpoint, on the machines that answer at that time."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from nmt_train.common import launcher
from nmt_train.common.errors import TRY_AGAIN, UserError
from nmt_train.common.plural import counted
from nmt_train.common.streams import tell
from nmt_train.launch import mpirun as launch
from nmt_train.launch.stop_request import PASSED_ON, handled_by

_ANSWER = 10.0  # seconds for a machine to answer
# Log messages of a run: after it has emptied its folder, when it has begun, and at its end.
_STARTED_OVER, _BEGUN, _STOPPED = "] started over", "] in force: ", "] stopped: "
_CHECK = "check the machines; `ssh MACHINE true` must work without a password"
_PAUSE = 2.0  # seconds between an end and the next start
_SILENCE, _LONGEST_PAUSE = 3600.0, 60.0  # seconds to wait for a machine if none answers; at most, between two attempts
# Success, a user error, or a stop by a signal. After any other status, a restart may help.
_FINAL = frozenset({0, 2, *(128 + number for number in PASSED_ON)})
# Strict, because ssh and other remote launchers could interpret other text as options or commands.
_NAME, _ADDRESS = r"\w[\w.-]*", r"[0-9a-f:]*:[0-9a-f:.]*(?:%\w+)?"  # names and IPv4; IPv6
_LINE = re.compile(rf"((?:{_NAME}@)?(?:{_NAME}|{_ADDRESS}))(?:\s+slots\s*=\s*(\d{{1,5}}))?", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class Host:
    name: str
    slots: int = 1


def read_hosts(path: Path) -> list[Host]:
    """Read a hostfile in mpirun's format, with one `NAME slots=RANKS` per line; UserError names what is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise UserError(f"--hosts {path}: cannot be read ({error}); name a file with lines of NAME slots=RANKS") from None
    slots: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        match = _LINE.fullmatch(text)
        if text and (match is None or not int(match[2] or 1)):
            raise UserError(f"{path}, line {number}: {text!r} is not a machine; write NAME, or NAME slots=RANKS")
        if match is not None:
            slots[match[1]] = slots.get(match[1], 0) + int(match[2] or 1)
    if not slots:
        raise UserError(f"--hosts {path}: names no machine; write one per line: NAME slots=RANKS")
    return [Host(name, number) for name, number in slots.items()]


def answering(hosts: Sequence[Host]) -> list[Host]:
    """The hosts that can be reached as mpirun reaches them: by ssh, or by the agent that PRTE_MCA_plm_ssh_agent names."""
    agent = os.environ.get("PRTE_MCA_plm_ssh_agent")  # noqa: SIM112 - Open MPI writes it so
    reach = agent.split() if agent else ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_ANSWER:.0f}"]
    end = ["--"] if Path(reach[0]).name == "ssh" else []  # ends the options of ssh; other agents may not know it

    def answers(host: Host) -> bool:
        try:
            command, nothing = [*reach, *end, host.name, "true"], subprocess.DEVNULL
            done = subprocess.run(command, stdin=nothing, capture_output=True, timeout=_ANSWER + 1, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0

    with ThreadPoolExecutor(len(hosts)) as pool:
        return [host for host, there in zip(hosts, pool.map(answers, hosts), strict=True) if there]


@dataclass(frozen=True)
class Job:
    """How to run this command as several ranks.

    hosts: if empty, this machine. restarts: the maximum number. arguments: the arguments of the command.
    """

    hosts: Sequence[Host] = ()
    restarts: int = 0
    arguments: Sequence[str] = ()


def run_once(hosts: Sequence[Host], arguments: Sequence[str], module: str) -> int:
    """Run a command of this package as one rank per slot of the hosts; returns its exit status. UserError if one is silent."""
    answers = answering(hosts)
    if silent := [host.name for host in hosts if host not in answers]:
        raise UserError(f"--hosts: no answer from {', '.join(silent)}; {_CHECK}")
    with _hostfile(hosts) as options:
        return launch.mpirun(sum(host.slots for host in hosts), arguments, options, lambda line: None, module)


@contextmanager
def _hostfile(hosts: Sequence[Host]) -> Iterator[list[str]]:
    """The options of mpirun for these hosts; none if there are none."""
    if not hosts:
        yield []
        return
    with tempfile.NamedTemporaryFile("w", prefix="nmt-train-hosts-", encoding="utf-8") as file:
        try:
            file.writelines(f"{host.name} slots={host.slots}\n" for host in hosts)
            file.flush()
        except OSError as error:
            error.filename = file.name
            raise
        yield ["--hostfile", file.name]


class _Asked(BaseException):
    """Raised when a signal asks to stop while no job runs; the argument is the number of the signal."""


def supervise(job: Job, ranks: int) -> int:
    """Run nmt-train under mpirun, and restart it if it fails, at most `job.restarts` times.

    Returns the last exit status, or 128 + the number of the signal that asked to stop. The number of ranks is the number of
    slots of the hosts, or `ranks` if the job runs on this machine. Raises UserError if no host answers before the first start,
    or one does not and the job may not be restarted.
    """

    def ask(number: int, frame: FrameType | None) -> None:
        raise _Asked(number)

    try:
        with handled_by(ask):
            return _repeat(job, ranks)
    except _Asked as asked:
        return 128 + int(asked.args[0])


def _repeat(job: Job, ranks: int) -> int:
    arguments, restarted = list(job.arguments), ""
    for left in range(job.restarts, -1, -1):
        status, said = _run(job, ranks, arguments, restarted)
        if status in _FINAL or not left:
            break
        restarted = launcher.BEGUN if _BEGUN in said or restarted == launcher.BEGUN else launcher.NOT_BEGUN
        if _STARTED_OVER in said:  # the restart must keep what the run has written so far
            arguments = [argument for argument in arguments if argument != "--overwrite"]
        _say(f"the job ended with status {status}: starting it again ({counted(left - 1, 'more restart')} allowed)")
        time.sleep(_PAUSE)
    return status


def _run(job: Job, ranks: int, arguments: Sequence[str], restarted: str) -> tuple[int, set[str]]:
    """Run the job once; returns its exit status, and which of the log messages above it has written.

    restarted: the value of RESTARTED; empty for the first start.
    """
    there = _answering_in_time(job.hosts, patient=bool(restarted)) if job.hosts else []
    if silent := [host.name for host in job.hosts if host not in there]:
        problem = f"no answer from {', '.join(silent)}"
        if not restarted and not (there and job.restarts):
            alternative = "; with --restarts, training begins without them" if there else ""
            raise UserError(f"--hosts: {problem}; {_CHECK}{alternative}")
        _say(f"{problem}; {'continuing without' if there else _CHECK}")
        if not there:
            return TRY_AGAIN, set()
    said: set[str] = set()

    def heard(line: str) -> None:
        said.update(mark for mark in (_STARTED_OVER, _BEGUN, _STOPPED) if mark in line)

    with _hostfile(there) as options:
        options += ("-x", f"{launcher.RESTARTED}={restarted}") if restarted else ()
        status = launch.mpirun(sum(host.slots for host in there) or ranks, arguments, options, heard)
    if not status and _STOPPED not in said:  # mpirun may return 0 for a job that never began
        tell("error: mpirun ended without an error, but before training did; start the same command again")
        return TRY_AGAIN, said
    return status, said


def _answering_in_time(hosts: Sequence[Host], patient: bool) -> list[Host]:
    """As `answering`; if `patient`, wait for up to an hour until a machine answers, without using up a restart."""
    there, pause, waited = answering(hosts), _PAUSE, 0.0
    if patient and not there:
        _say(f"none of {', '.join(host.name for host in hosts)} answers: waiting up to {_SILENCE / 60:.0f} minutes for one")
    while patient and not there and waited < _SILENCE:
        time.sleep(pause)
        waited, pause = waited + pause, min(2 * pause, _LONGEST_PAUSE)
        there = answering(hosts)
    return there


def _say(text: str) -> None:
    tell(f"nmt-train: {text}")
