from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from nmt_train.common.errors import UserError
from nmt_train.report import convergence, timeline
from nmt_train.report.figure import BLUE, CONTEXT, GREEN, ORANGE, look

PNG = b"\x89PNG\r\n"


def run_folder(folder: Path, entropies: list[float]) -> Path:
    folder.mkdir()
    events = [{"event": "train", "update": 1, "cost": 9.0}]
    for number, entropy in enumerate(entropies, 1):
        events.append({
            "event": "validation", "update": 100 * number, "epoch": number, "words": 5000 * number, "seconds": 60.0 * number,
            "training_seconds": 50.0 * number, "cross-entropy": entropy,
        })  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    return folder


def test_convergence_draws_every_run_and_writes_its_points(tmp_path: Path) -> None:
    runs = [run_folder(tmp_path / "slow", [5.0, 4.0, 3.5]), run_folder(tmp_path / "fast", [4.0, 3.0])]
    for ending, head in ((".png", PNG), (".svg", b"<?xml")):
        picture, table = convergence.plot(runs, "cross-entropy", "seconds", tmp_path / "out" / f"curves{ending}")
        assert picture.read_bytes().startswith(head)
    assert (
        b"fast" in (tmp_path / "out" / "curves.svg").read_bytes() or b"<path" in (tmp_path / "out" / "curves.svg").read_bytes()
    )
    rows = list(csv.DictReader(table.open(encoding="utf-8")))
    assert [(row["run"], float(row["seconds"]), float(row["cross-entropy"])) for row in rows] == [
        (str(runs[0]), 60.0, 5.0), (str(runs[0]), 120.0, 4.0), (str(runs[0]), 180.0, 3.5),
        (str(runs[1]), 60.0, 4.0), (str(runs[1]), 120.0, 3.0),
    ]  # fmt: skip


def test_runs_look_as_their_modes_do_everywhere_if_they_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = list[Any]()
    monkeypatch.setattr(convergence, "save_figure", lambda figure, output: drawn.append(figure.axes[0]))
    modes = ("sparse-overlap", "single", "strom")
    runs = [run_folder(tmp_path / f"run of {mode}", [5.0, 4.0]) for mode in modes]
    for run, mode in zip(runs, modes, strict=True):
        (run / "config.yml").write_text(f"mode: {mode}\n", encoding="utf-8")
    convergence.plot(runs, "cross-entropy", "seconds", tmp_path / "a.png")
    assert [line.get_color() for line in drawn[0].lines] == [look(mode)["color"] for mode in modes]
    assert [text.get_text() for text in drawn[0].texts] == [run.name for run in runs]
    others = [run_folder(tmp_path / f"{number}", [5.0]) for number in range(5)]
    convergence.plot(others, "cross-entropy", "seconds", tmp_path / "b.png")
    assert [line.get_color() for line in drawn[1].lines] == [BLUE, ORANGE, GREEN, CONTEXT, CONTEXT]


def test_the_title_says_what_came_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = list[Any]()
    monkeypatch.setattr(convergence, "save_figure", lambda figure, output: drawn.append(figure.get_suptitle()))
    slow, fast = run_folder(tmp_path / "slow", [5.0, 4.0]), run_folder(tmp_path / "fast", [3.0, 3.5])
    convergence.plot([slow], "cross-entropy", "seconds", tmp_path / "a.png")
    convergence.plot([slow, fast], "cross-entropy", "seconds", tmp_path / "b.png")
    assert drawn == ["slow: cross-entropy 4 after 120 s", "Best cross-entropy: 3 (fast)"]


def test_a_run_may_have_any_name(tmp_path: Path) -> None:
    runs = [run_folder(tmp_path / name, [5.0, 4.0]) for name in (r"a$\x$", "_mine")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings(
            "ignore", "'.*' deprecated - use", DeprecationWarning
        )  # older matplotlib with a newer pyparsing
        picture, _ = convergence.plot(runs, "cross-entropy", "seconds", tmp_path / "curves.png")
    assert picture.read_bytes().startswith(PNG)


def test_convergence_refuses_what_it_cannot_draw(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", [5.0])
    with pytest.raises(UserError, match="no validation measured bleu"):
        convergence.plot([run], "bleu", "seconds", tmp_path / "a.png")
    with pytest.raises(UserError, match="give a run folder"):
        convergence.plot([tmp_path / "absent"], "bleu", "seconds", tmp_path / "a.png")
    (tmp_path / "old").mkdir()
    event = {"event": "validation", "update": 1, "bleu": 3}
    (tmp_path / "old" / "metrics.jsonl").write_text(json.dumps(event) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match="no validation measured bleu"):
        convergence.plot([tmp_path / "old"], "bleu", "seconds", tmp_path / "a.png")
    (tmp_path / "old" / "metrics.jsonl").write_bytes(b"\xff\n")
    with pytest.raises(UserError, match="line 1: not an event"):
        convergence.plot([tmp_path / "old"], "bleu", "seconds", tmp_path / "a.png")
    with pytest.raises(UserError, match="unknown extension"):
        convergence.plot([run], "cross-entropy", "seconds", tmp_path / "a.txt")


@pytest.fixture
def traced(tmp_path: Path) -> Path:
    (tmp_path / "run" / "trace").mkdir(parents=True)
    for rank in (0, 1):
        spans = [
            {
                "name": name,
                "thread": "MainThread",
                "rank": rank,
                "start": 10 + step + offset,
                "end": 10 + step + end,
                "update": step,
            }
            for step in range(20)
            for name, offset, end in (("forward", 0.0, 0.3), ("backward", 0.3, 0.9), ("update", 0.9, 1.0))
        ]
        text = "".join(json.dumps(span) + "\n" for span in spans)
        (tmp_path / "run" / "trace" / f"rank{rank}.jsonl").write_text(text, encoding="utf-8")
    return tmp_path / "run"


@pytest.mark.slow
def test_figures_need_no_backend_of_a_notebook() -> None:
    own = os.environ | {"MPLBACKEND": "module://no_such_package.backend"}
    command = [sys.executable, "-c", "from nmt_train.report.figure import new_figure; new_figure(1, 1)"]
    assert subprocess.run(command, env=own, capture_output=True, text=True).stderr == ""


@pytest.mark.parametrize(
    ("gaps", "first", "count"),
    [
        ([], 0, 0),
        ([1.0], 0, 1),
        ([1.0] * 5, 0, 5),  # a short run is shown whole
        ([1.0] * 40, 10, 10),
        ([1.0, 1.0, 1.0, 9.0, 1.0, 1.0], 0, 3),  # a validation after the fourth step
        ([1.0] * 12 + [9.0] + [1.0] * 12, 13, 10),
    ],
)
def test_the_window_of_a_timeline_has_steps_without_a_validation(gaps: list[float], first: int, count: int) -> None:
    starts = [sum(gaps[:step]) for step in range(len(gaps) + 1)]
    spans = [{"rank": 0, "thread": "MainThread", "name": "forward", "start": s, "end": s + 0.5} for s in starts]
    start, seconds = timeline.window(spans, None, None)
    assert start == starts[first]
    assert seconds == (starts[first + count] - starts[first] if count else 0.5)


def test_timeline_draws_a_window(traced: Path, tmp_path: Path) -> None:
    (picture,) = timeline.plot(traced, None, None, tmp_path / "t.png")
    assert picture.read_bytes().startswith(PNG)
    timeline.plot(traced, 2.0, 3.0, tmp_path / "t.svg")


@pytest.mark.slow
@pytest.mark.parametrize(("file", "clock"), [("", "wall-clock"), ("simulated.yml", "virtual"), ("timing.json", "virtual")])
def test_timeline_says_which_clock_it_shows(file: str, clock: str, traced: Path, tmp_path: Path) -> None:
    if file:
        (traced / file).touch()
    (picture,) = timeline.plot(traced, None, None, tmp_path / "t.svg")
    assert f"<!-- {clock} time (seconds" in picture.read_text(encoding="utf-8")


def test_several_runs_are_compared_by_what_their_first_workers_do(traced: Path, tmp_path: Path) -> None:
    """Of every second, the worker computes for 0.9 s."""
    shutil.copytree(traced, tmp_path / "other")
    (picture,) = timeline.compare([traced, tmp_path / "other"], None, tmp_path / "t.svg")
    text = picture.read_text(encoding="utf-8")
    assert text.count("computes 90%") == 2
    assert "other" in text
    with pytest.raises(UserError, match="--seconds -1: the window must be longer than zero"):
        timeline.compare([traced, traced], -1, tmp_path / "t.svg")


def test_rows_are_named_without_what_all_names_end_with(traced: Path, tmp_path: Path) -> None:
    runs = [shutil.copytree(traced, tmp_path / name) for name in ("sync-2-hosts", "low-bit-2-hosts")]
    text = timeline.compare(runs, None, tmp_path / "t.svg")[0].read_text(encoding="utf-8")
    assert "<!-- sync: computes" in text
    assert "<!-- low-bit: computes" in text


def test_timeline_refuses_windows_outside_the_trace_and_runs_without_one(traced: Path, tmp_path: Path) -> None:
    for start, seconds in ((99.0, 1.0), (-1.0, 1.0), (0.0, 0.0)):
        with pytest.raises(UserError, match=r"--start|--seconds"):
            timeline.plot(traced, start, seconds, tmp_path / "t.png")
    with pytest.raises(UserError, match="train with --trace true"):
        timeline.plot(tmp_path, None, None, tmp_path / "t.png")
    (traced / "trace" / "rank0.jsonl").write_text('{"name": "forward"}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"rank0\.jsonl, line 1: not a span"):
        timeline.plot(traced, None, None, tmp_path / "t.png")


def test_the_chrome_trace_has_every_span_in_microseconds_under_its_rank(traced: Path, tmp_path: Path) -> None:
    (path,) = timeline.chrome(traced, tmp_path / "trace.json")
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 2 * 20 * 3
    assert spans[0]["ts"] == 10_000_000
    assert spans[0]["dur"] == 300_000
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"rank 0", "rank 1", "worker"}
