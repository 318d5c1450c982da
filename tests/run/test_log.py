"""Log lines against the shapes that tools for Marian's logs look for."""

from __future__ import annotations

import errno
import io
import json
import re
import sys
from datetime import datetime
from pathlib import Path

import pytest
import torch

from nmt_train.common.errors import UserError
from nmt_train.run import progress_bar
from nmt_train.run.log import Log, LogConfig, read_metrics, rewind_metrics, rewind_spans
from nmt_train.run.progress import Progress
from nmt_train.run.progress_bar import ProgressBar
from nmt_train.run.stopping import Verdict

STAMP = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] "
TRAIN = re.compile(
    STAMP + r"Ep\. (\d+) : Up\. (\d+) : Sen\. ([\d,]+) : Cost (\d+\.\d{8}) : Time (\d+\.\d\d)s : (\d+\.\d\d) words/s"
    r" : gNorm (\d+\.\d{4}) : L\.r\. (\d\.\d{4}e[+-]\d\d)"
)
VALID = re.compile(
    STAMP + r"\[valid\] Ep\. (\d+) : Up\. (\d+) : ([a-z-]+) : (\d+\.\d+)"
    r" : (new best|stalled (\d+) times? \(last best: (\d+\.\d+)\))"
)


def progress() -> Progress:
    state = Progress(epochs=2, batches=7, updates=1000, sentences=79_760, tokens=5000, seconds=20.0, training_seconds=14.5)
    state.logged_seconds, state.cost, state.cost_tokens = 12.5, 4.5 * 600, 600
    return state


def test_training_lines_have_marians_shape(tmp_path: Path) -> None:
    log = Log.open(tmp_path, LogConfig())
    log.train(progress(), 0.1234, 3e-4)
    log.close()
    match = TRAIN.fullmatch((tmp_path / "train.log").read_text(encoding="utf-8").rstrip("\n"))
    assert match is not None
    assert match.groups() == ("3", "1000", "79,760", "4.50000000", "2.00", "300.00", "0.1234", "3.0000e-04")
    event = read_metrics(tmp_path / "metrics.jsonl")[0]
    expected = {"event": "train", "update": 1000, "epoch": 3, "words": 5000, "seconds": 20.0, "training_seconds": 14.5}
    assert expected.items() <= event.items()
    assert event["words_per_second"] == 300.0


def test_validation_lines_are_named_after_the_metric(tmp_path: Path) -> None:
    log = Log.open(tmp_path, LogConfig())
    scores = {"bleu": 27.4341, "cross-entropy": 4.321, "chrf": 50.0}
    verdicts = {"bleu": Verdict(27.4341, 0), "cross-entropy": Verdict(4.2, 2), "chrf": Verdict(51.0, 1)}
    log.validation(progress(), scores, {"bleu": "nrefs:1"}, verdicts, 3e-4)
    log.close()
    lines = (tmp_path / "train.log").read_text(encoding="utf-8").splitlines()
    matches = [VALID.fullmatch(line) for line in lines]
    assert all(matches)
    assert [match.group(3, 4, 5) for match in matches if match] == [
        ("bleu", "27.4341", "new best"),
        ("cross-entropy", "4.3210", "stalled 2 times (last best: 4.2000)"),
        ("chrf", "50.0000", "stalled 1 time (last best: 51.0000)"),
    ]
    event = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert (event["cross-entropy"], event["signatures"], event["learning_rate"]) == (4.321, {"bleu": "nrefs:1"}, 3e-4)
    assert datetime.fromisoformat(event["time"]).tzinfo is not None


def test_the_cost_is_the_mean_per_token_since_the_last_line() -> None:
    state = Progress()
    for loss, tokens in ((2.0, 100), (4.0, 300)):
        state._waiting.append((torch.tensor(loss), tokens))
    assert state.mean_cost() == 3.5
    state.logged()
    assert (state.cost, state.cost_tokens) == (0.0, 0)


def test_metrics_are_rewound_to_where_a_run_continues_and_an_unfinished_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"event": "train", "update": n}) + "\n" for n in (5, 10, 15)) + '{"event": "tr')
    assert [event["update"] for event in read_metrics(path)] == [5, 10, 15]
    rewind_metrics(path, 10)
    assert [event["update"] for event in read_metrics(path)] == [5, 10]
    for wrong in ("nonsense", "[5]", "{}", "[" * 100_000):
        path.write_text(wrong + "\n")
        with pytest.raises(UserError, match=r"metrics\.jsonl, line 1: not an event of a run"):
            read_metrics(path)
    with pytest.raises(UserError, match="give a run folder"):
        read_metrics(tmp_path / "absent" / "metrics.jsonl")


def test_spans_are_rewound_too_with_those_that_are_damaged(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_text("".join(json.dumps({"name": "forward", "update": n}) + "\n" for n in (5, 10, 15)) + '[]\n{"na\n{"name')
    rewind_spans(tmp_path, 10)
    assert [json.loads(line)["update"] for line in path.read_text().splitlines()] == [5, 10]
    rewind_spans(tmp_path, -1)
    assert path.read_text() == ""


def test_lines_are_kept_although_the_terminal_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def write(self, text: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

        flush = write

    log = Log.open(tmp_path, LogConfig())
    monkeypatch.setattr(sys, "stderr", Gone())
    log.say("still training")
    log.close()
    assert "still training" in (tmp_path / "train.log").read_text(encoding="utf-8")


def test_an_epoch_goes_on_when_other_workers_begin_the_rest_of_it_anew() -> None:
    state = Progress(epochs=2, batches=7, sentences=80)
    state.at(2, 0)
    state.skip()
    assert (state.epoch, state.sentences) == (3, 80)
    state.at(3, 0)
    assert state.epoch == 3
    state.skip()
    assert (state.epoch, state.sentences) == (4, 0)


@pytest.mark.parametrize("full", ["train.log", "metrics.jsonl"])
def test_a_full_disk_is_said_of_the_file_that_could_not_be_written(tmp_path: Path, full: str) -> None:
    (tmp_path / full).symlink_to("/dev/full")
    log = Log.open(tmp_path, LogConfig())
    with pytest.raises(
        UserError, match=f"{full}: could not be written: No space left on device; free some space .* continues from"
    ):
        log.train(progress(), 0.1234, 3e-4)
    log.close()


def test_the_bar_says_that_this_rank_validates(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 100, 2))
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: next(now))
    terminal = io.StringIO()
    bar = ProgressBar(terminal)
    bar.validating()
    assert not terminal.getvalue(), "before the first update, there is no bar"
    bar.advance(Progress(), 0.5)
    bar.validating()
    bar.close()
    assert "left, validating" in terminal.getvalue()
