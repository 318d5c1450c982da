"""Whether other processes use the cores, and what compute threads do then."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nmt_train.common import shared_cores
from nmt_train.common.shared_cores import SharedCores

SECOND = 10**9


class Clock:
    """Two threads, whose waiting shares the test decides."""

    def __init__(self) -> None:
        self.cores, self._times = SharedCores(), {"1": (0, 0), "2": (0, 0)}

    def pass_second(self, share: float) -> bool:
        def later(ran: int, waited: int) -> tuple[int, int]:
            return ran + round((1 - share) * SECOND), waited + round(share * SECOND)

        self._times = {thread: later(*times) for thread, times in self._times.items()}
        self.cores.check(dict(self._times))
        return self.cores.shared


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(shared_cores.torch, "get_num_threads", lambda: 2)
    return Clock()


def test_a_waiting_thread_sleeps_while_others_use_the_cores(clock: Clock) -> None:
    assert not clock.pass_second(0.1)
    assert clock.pass_second(0.3)
    assert all(clock.pass_second(0.03) for _ in range(29)), "they may be about to return"
    assert clock.pass_second(0.1)
    assert all(clock.pass_second(0.03) for _ in range(29))
    assert not clock.pass_second(0.03)
    assert clock.pass_second(0.5)


def test_threads_that_end_or_begin_do_not_change_the_share(clock: Clock) -> None:
    clock.pass_second(0.0)
    clock.cores.check({"2": (SECOND, 0), "3": (SECOND, 0)})
    assert not clock.cores.shared
    clock.cores.check({"3": (SECOND, SECOND)})
    assert clock.cores.shared


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="only Linux counts how long threads wait for a core")
def test_idle_threads_are_started_and_ended_and_no_result_changes() -> None:
    """There are more compute threads than cores, which is when GNU OpenMP spins less."""
    program = """
import os, torch
from nmt_train.common.shared_cores import SharedCores, waited

def product():
    return torch.mm(a, a).tanh().sum(0)

torch.set_num_threads(2)
torch.manual_seed(1)
a = torch.randn(300, 300)
before, threads = product(), len(waited())
cores = SharedCores()
cores.check({"1": (0, 1)})
while len(waited()) - 2 < len(os.sched_getaffinity(0)):
    pass
assert torch.equal(product(), before)
for time in range(30):
    cores.check({"1": (time + 1, 1)})
while len(waited()) > threads:
    pass
assert torch.equal(product(), before)
print("as before")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "as before\n"


@pytest.mark.parametrize("given", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_whoever_sets_the_waiting_of_threads_keeps_it(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv(given, "1")
    monkeypatch.setattr(shared_cores.torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(shared_cores.threading, "Thread", None)
    shared_cores.watch(tells=True)


def test_a_process_is_watched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    class Thread:
        def __init__(self, **given: object) -> None: ...

        def start(self) -> None:
            begun.append(self)

    monkeypatch.setattr(shared_cores, "_watched", threading.Lock())
    monkeypatch.setattr(shared_cores, "_TASKS", Path("/"))
    monkeypatch.setattr(shared_cores.torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(shared_cores.threading, "Thread", Thread)
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for _ in range(3):
        shared_cores.watch(tells=True)
    assert len(begun) == 1


def test_the_times_are_those_of_this_process() -> None:
    if not (times := shared_cores.waited()):
        pytest.skip("only Linux counts how long threads wait for a core")
    assert str(os.getpid()) in times
    assert all(ran >= 0 and waiting >= 0 for ran, waiting in times.values())
