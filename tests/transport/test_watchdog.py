"""Who hangs is told from who waits, who computes for long, and who stood still together with all others."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from nmt_train.transport import Tag
from nmt_train.transport.local import LocalTransport
from nmt_train.transport.watchdog import AwakeClock, Watchdog


@pytest.fixture
def watch() -> Watchdog:
    made = Watchdog()
    made.begin()
    return made


def test_a_task_hangs_that_gives_no_sign_of_life_for_ten_deadlines(watch: Watchdog) -> None:
    assert watch.hung(99, deadline=10) is None
    assert "has not ended for 101 s" in str(watch.hung(2, deadline=10))
    watch.sign()
    assert watch.hung(99, deadline=10) is None


def test_where_computations_are_long_more_time_is_given(watch: Watchdog) -> None:
    watch.hung(30, deadline=10)
    watch.sign()
    assert watch.hung(20 * 30, deadline=10) is None
    assert "longer than 30.0 s" in str(watch.hung(1, deadline=10))


def test_a_task_that_has_ended_does_not_hang(watch: Watchdog) -> None:
    watch.end()
    watch.sign()  # late
    assert watch.hung(1e6, deadline=10) is None


def test_each_task_of_a_rank_is_watched() -> None:
    transport = LocalTransport()
    stuck, released = threading.Event(), threading.Event()

    def task() -> None:
        transport.now()
        stuck.set()
        released.wait()

    with transport.watched(deadline=1e9):
        other = transport.spawn("server", task)
        stuck.wait()
        waiting = transport.receive(None, Tag.PUSH)
        for look in range(25):
            assert transport._watch.hung(4, deadline=10) is None
            transport.now() if look % 2 else waiting.alive()  # as a wait does now and then
        assert "run (local.py, line " in str(transport._watch.hung(4, deadline=10))
        released.set()
        other.result()
        assert transport._watch.hung(0, deadline=10) is None


def test_who_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up: Future[str] = Future()
    monkeypatch.setattr("nmt_train.transport.watchdog._LOOK", 0.01)
    with Watchdog().over(0.001, given_up.set_result):
        assert "has not ended for 0 s" in given_up.result()


def test_time_in_which_the_process_stood_still_does_not_count_as_anybodys_silence() -> None:
    seconds = iter([0.0, 0.4, 0.9, 500.9, 501.4])
    clock = AwakeClock(1.0, lambda: next(seconds))
    assert [round(clock.now(), 6) for _ in range(4)] == [0.4, 0.9, 1.9, 2.4]
