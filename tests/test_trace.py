from __future__ import annotations

import json
from pathlib import Path

import pytest

from nmt_train.trace import Trace, write_spans
from nmt_train.transport.local import LocalTransport


class Ticks(LocalTransport):
    """A clock that shows the given times, and where work takes no time."""

    def __init__(self, *ticks: float) -> None:
        super().__init__()
        self.times, self.spent = iter(ticks), []

    def now(self) -> float:
        return next(self.times)

    def spend(self, name: str, work: float, seconds: float, parts: int = 1) -> None:
        self.spent.append((name, work, seconds, parts))


def test_spans_have_name_thread_and_times_of_the_given_clock(tmp_path: Path) -> None:
    trace = Trace(keep=True, clock=(clock := Ticks(1.0, 1.25, 1.5, 2.0, 4.0)))
    with trace.span("forward", 30, 2):
        pass
    assert clock.spent == [("forward", 30, 0.25, 2)]
    trace.update = 7
    with trace.span("backward"):
        pass
    write_spans(tmp_path / "trace", 3, 1, trace.take())
    write_spans(tmp_path / "trace", 3, 1, trace.take())
    lines = [json.loads(line) for line in (tmp_path / "trace" / "rank3.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines == [
        {"name": "forward", "thread": "MainThread", "rank": 3, "node": 1, "start": 1.0, "end": 1.5, "update": 0},
        {"name": "backward", "thread": "MainThread", "rank": 3, "node": 1, "start": 2.0, "end": 4.0, "update": 7},
    ]


def test_a_span_that_fails_is_still_recorded_and_device_work_is_waited_for() -> None:
    settled = []
    trace = Trace(keep=True, clock=(clock := Ticks(1.0, 1.5)), settle=lambda: settled.append(1))
    with pytest.raises(KeyError), trace.span("update", 100):
        raise KeyError
    assert settled == [1]
    assert clock.spent == []
    assert len(trace.take()) == 1


def test_without_keeping_only_sums_remain(tmp_path: Path) -> None:
    clock = Ticks(1.0, 1.5, 2.0, 4.0)
    trace = Trace(keep=False, clock=clock, settle=lambda: pytest.fail("waiting for the device costs time"))
    for _ in range(2):
        with trace.span("forward"):
            pass
    write_spans(tmp_path / "trace", 0, 0, trace.take())
    assert trace.spent["MainThread"]["forward"] == 2.5
    assert list(tmp_path.iterdir()) == []
