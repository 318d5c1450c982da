from __future__ import annotations

import json
from pathlib import Path

from nmt_train.trace import Trace


def test_spans_have_name_thread_and_times_of_the_given_clock(tmp_path: Path) -> None:
    ticks = iter([1.0, 1.5, 2.0, 4.0])
    trace = Trace(tmp_path / "trace" / "rank0.jsonl", now=lambda: next(ticks))
    with trace.span("forward"):
        pass
    trace.update = 7
    with trace.span("backward"):
        pass
    trace.flush()
    trace.flush()
    lines = [json.loads(line) for line in (tmp_path / "trace" / "rank0.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines == [
        {"name": "forward", "thread": "MainThread", "rank": 0, "start": 1.0, "end": 1.5, "update": 0},
        {"name": "backward", "thread": "MainThread", "rank": 0, "start": 2.0, "end": 4.0, "update": 7},
    ]


def test_a_span_that_fails_is_still_recorded_and_device_work_is_waited_for(tmp_path: Path) -> None:
    settled = []
    trace = Trace(tmp_path / "t.jsonl", settle=lambda: settled.append(1))
    try:
        with trace.span("update"):
            raise KeyError
    except KeyError:
        pass
    trace.flush()
    assert settled == [1]
    assert len((tmp_path / "t.jsonl").read_text().splitlines()) == 1


def test_off_means_one_shared_context_and_no_file(tmp_path: Path) -> None:
    trace = Trace(None)
    assert trace.span("forward") is trace.span("backward")
    with trace.span("forward"):
        pass
    trace.flush()
    assert list(tmp_path.iterdir()) == []
