"""Compute threads that wait for each other sleep sooner where other processes use the same cores.

At the end of a parallel loop, threads of GNU OpenMP (torch's on Linux) spin until the last one has finished. On cores of their
own that is fastest; on shared ones, those that spin take the time that the last one needs. While a process has more of these
threads than cores, GNU OpenMP spins 3,000 times shorter. So a few idle threads are enough to change it at any time, and no
result changes.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

import torch

from nmt_train.common.streams import tell

_BUSY, _FREE = 0.2, 0.05  # shares of the time in which threads that could run wait for a core
_PATIENCE = 30  # checks in a row
_MOST = (
    16  # idle threads, each with its team: many more could exceed a limit of the system, and GNU OpenMP would end the process
)
_TASKS = Path("/proc/self/task")
_watched = threading.Lock()  # held once a thread watches: a process needs one


def watch(*, tells: bool) -> None:
    """Check once per second, in the background, whether other processes use the cores; again, this does nothing.

    tells: print a line the first time.
    """
    given = "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ
    if torch.get_num_threads() > 1 and _TASKS.exists() and not given and _watched.acquire(blocking=False):
        threading.Thread(target=_watch, args=(SharedCores(), tells), name="shared-cores", daemon=True).start()


def _watch(cores: SharedCores, tells: bool) -> None:
    pause = threading.Event()
    while not pause.wait(1):
        try:
            cores.check(waited())
        except (OSError, ValueError):  # for example, too many open files
            continue
        except RuntimeError:  # no more threads
            return
        if cores.shared and tells:
            tells = False
            tell("other work uses the same cores: compute threads that wait now sleep instead of spinning")


def waited() -> dict[str, tuple[int, int]]:
    """Nanoseconds for which each thread of this process has run, and for which it could have run but waited for a core."""
    times = {}
    for task in _TASKS.iterdir():
        with suppress(OSError):  # it has ended
            ran, waiting, *_ = (task / "schedstat").read_text(encoding="ascii").split()
            times[task.name] = int(ran), int(waiting)
    return times


class SharedCores:
    """shared: whether other work, mostly other processes, seems to use the cores, so that waiting threads sleep."""

    def __init__(self) -> None:
        self.shared = False
        self._before: dict[str, tuple[int, int]] = {}
        self._free = 0  # checks since the last one in which threads waited
        self._end = threading.Event()  # ends the idle threads

    def check(self, times: dict[str, tuple[int, int]]) -> None:
        """times: what `waited` returns."""
        pairs = [(self._before.get(thread, (0, 0)), now) for thread, now in times.items()]
        ran, waiting = (sum(now[its] - before[its] for before, now in pairs) for its in range(2))
        self._before = times
        share = waiting / max(1, ran + waiting)
        self._free = self._free + 1 if share < _FREE else 0
        if not self.shared and share > _BUSY:
            self._begin()
        elif self.shared and self._free >= _PATIENCE:
            self._end.set()
            self.shared = False

    def _begin(self) -> None:
        threads = torch.get_num_threads()
        cores = len(os.sched_getaffinity(0))
        idle = max(1, -(-cores // max(1, threads - 1)) - 1)  # then there are more threads than cores
        if threads < 2 or idle > _MOST:
            return
        self.shared, self._end = True, threading.Event()
        for _ in range(idle):
            threading.Thread(target=_idle, args=(threads, self._end), daemon=True).start()


def _idle(threads: int, end: threading.Event) -> None:
    """Hold a team of compute threads of its own; GNU OpenMP keeps it until this thread ends."""
    torch.zeros(threads << 16, dtype=torch.uint8).add_(1)  # large enough for torch to divide it among all threads
    end.wait()
