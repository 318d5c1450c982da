"""The logs of a run: Marian's log lines on the terminal and in `train.log`, JSON objects in `metrics.jsonl`, trackers."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, TextIO

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from nmt_train.common import atomic_file as durable
from nmt_train.common import launcher
from nmt_train.common.duration import Duration, Mark
from nmt_train.common.errors import UserError, remedy
from nmt_train.common.metric import is_worst
from nmt_train.common.plural import counted
from nmt_train.common.section import STRICT, as_list, one_of
from nmt_train.common.streams import tell
from nmt_train.run.progress import Progress
from nmt_train.run.progress_bar import ProgressBar
from nmt_train.run.stopping import Verdict
from nmt_train.run.trackers import TRACKERS, TrackedRun, Trackers

_EARLY = (10, 30, 60)  # log lines are also written this many seconds after training has begun


@dataclass(frozen=True, config=STRICT)
class LogConfig:
    """The logs that training writes."""

    every: Duration = Field(
        default=Duration.parse("100u"),
        description="interval between two log lines, as 100u, 1e, 50Kt or 1m; further ones follow 10, 30 and 60 seconds after"
        " training has begun or continued",
    )
    trackers: Annotated[list[Annotated[str, one_of(TRACKERS)]], BeforeValidator(as_list)] = Field(
        default=[],
        description="experiment trackers that also get the events: tensorboard, wandb, mlflow (each by its package, as in"
        " pip install '.[wandb]' in the project's folder); environment variables such as WANDB_MODE and"
        " MLFLOW_TRACKING_URI apply",
    )

    def due(self, before: Mark, now: Mark, started: float) -> bool:
        """Whether there is a log line between two marks. started: seconds of the run when this start began to train."""
        early = any(before.seconds - started < seconds <= now.seconds - started for seconds in _EARLY)
        return early or self.every.crossed(before, now)


@plain_dataclass
class Log:
    """Lines go to the terminal and `train.log`; events to `metrics.jsonl` (JSON), and their numbers to trackers.

    virtual: whether the seconds of events are those of a simulated cluster's clock.
    """

    text: TextIO
    metrics: TextIO
    trackers: Trackers = field(default_factory=Trackers)
    bar: ProgressBar | None = None
    virtual: bool = False

    @classmethod
    def open(cls, folder: Path, config: LogConfig, virtual: bool = False, tracked: TrackedRun | None = None) -> Log:
        """Open the log files of the run folder, to append to them. tracked: what trackers begin with."""
        terminal = launcher.terminal()
        bar = None if terminal is None else ProgressBar(terminal)
        text = open(folder / "train.log", "a", encoding="utf-8")
        metrics = open(folder / "metrics.jsonl", "a", encoding="utf-8")
        return cls(text, metrics, Trackers(config.trackers, tracked), bar, virtual)

    def say(self, message: str) -> None:
        """Write one line in Marian's format, `[date time] message`."""
        line = f"[{datetime.now():%Y-%m-%d %H:%M:%S}] {message}"
        if self.bar is not None:
            self.bar.clear()
        tell(line)  # mpirun, or the terminal, may be gone while ranks still train or save
        _write(self.text, line)

    def begun(self, progress: Progress, in_force: Mapping[str, str], forced: Sequence[str]) -> None:
        """Log an event for a start: the settings in force, and the forced differences from the run's configuration."""
        self._event("start", progress, {"in_force": dict(in_force), "forced": list(forced)})

    def train(self, progress: Progress, gradient_norm: float, learning_rate: float) -> None:
        """Log cost and speed since the last such line, the last gradient norm, and the learning rate."""
        cost, seconds = progress.mean_cost(), progress.training_seconds - progress.logged_seconds
        speed = progress.cost_tokens / seconds if seconds else 0.0
        self.say(
            f"Ep. {progress.epoch} : Up. {progress.updates} : Sen. {progress.sentences:,} : Cost {cost:.8f}"
            f" : Time {seconds:.2f}s : {speed:.2f} words/s : gNorm {gradient_norm:.4f} : L.r. {learning_rate:.4e}"
        )
        self._event(
            "train", progress,
            {"cost": cost, "words_per_second": speed, "gradient_norm": gradient_norm, "learning_rate": learning_rate},
        )  # fmt: skip
        progress.logged()

    def ranks(self, progress: Progress, line: str, values: dict[str, Any]) -> None:
        """Log the statistics of all ranks since the last such line (see rank_stats.py); `line` is empty for a single rank."""
        if line:
            self.say(f"[ranks] Up. {progress.updates} : {line}")
        self._event("ranks", progress, values)

    def validation(
        self, progress: Progress, scores: Mapping[str, float], signatures: Mapping[str, str], verdicts: Mapping[str, Verdict],
        learning_rate: float,
    ) -> None:  # fmt: skip
        """Log one line per metric: a new best, or for how many validations it has stalled.

        signatures: sacreBLEU's signatures of the metrics that have one.
        """
        for metric, value in scores.items():
            verdict = verdicts[metric]
            judged = (
                f"stalled {counted(verdict.stalled, 'time')} (last best: {verdict.best:.4f})" if verdict.stalled else "new best"
            )
            if is_worst(metric, verdict.best):
                judged = "no best yet"
            self.say(f"[valid] Ep. {progress.epoch} : Up. {progress.updates} : {metric} : {value:.4f} : {judged}")
        values = {**scores, "signatures": dict(signatures), "learning_rate": learning_rate}
        self._event("validation", progress, values)

    def lost(self, progress: Progress, ended: str, ranks: int, updates: int, again: int) -> None:
        """Log that the ranks described by `ended` have ended and the other `ranks` ranks continue.

        updates: the maximum number of updates that a shard lost. again: how many batches the other ranks train again.
        """
        others = "the last rank continues" if ranks == 1 else f"the other {ranks} ranks continue"
        lost = f"lost: at most {counted(updates, 'update')} of a shard; trained again: {counted(again, 'batch', 'batches')}"
        self.say(f"{ended} ended: {others}; {lost}")
        self._event("recovery", progress, {"ended": ended, "ranks": ranks, "lost_updates": updates, "batches_again": again})

    def _event(self, kind: str, progress: Progress, values: dict[str, Any]) -> None:
        time = {"clock": "virtual"} if self.virtual else {"time": datetime.now().astimezone().isoformat(timespec="seconds")}
        record = {
            "event": kind, **time, "update": progress.updates, "epoch": progress.epoch, "sentences": progress.sentences,
            "words": progress.tokens, "seconds": round(progress.seconds, 3),
            "training_seconds": round(progress.training_seconds, 3), **values,
        }  # fmt: skip
        _write(self.metrics, json.dumps(record))
        numbers = {f"{kind}/{name}": value for name, value in values.items() if isinstance(value, float)}
        self.trackers.numbers(numbers, progress.updates)
        self._say_of_trackers()

    def _say_of_trackers(self) -> None:
        for sentence in self.trackers.sentences():
            self.say(sentence)

    def close(self) -> None:
        self.trackers.close()
        with contextlib.suppress(UserError):
            self._say_of_trackers()
        for stream in (self.bar, self.text, self.metrics):
            if stream is not None:
                with contextlib.suppress(OSError):  # the failed write has already raised an error
                    stream.close()


def _write(file: TextIO, line: str) -> None:
    try:
        print(line, file=file, flush=True)
    except OSError as error:
        raise UserError(
            f"{file.name}: could not be written: {error.strerror}; {remedy(error)}; the same command continues from the last"
            " checkpoint"
        ) from None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The events of a `metrics.jsonl`; UserError names a damaged line. An unfinished last line is ignored."""
    events = []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a run folder, which has this file") from None
    for number, line in enumerate(lines[:-1], 1):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict) or "event" not in event:
            raise UserError(f"{path}, line {number}: not an event of a run; remove the line")
        events.append(event)
    return events


def validations(run: Path) -> list[dict[str, Any]]:
    """The validation events of a run folder."""
    return events(run, "validation")


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind in a run folder; none if the folder has no `metrics.jsonl`."""
    file = run / "metrics.jsonl"
    return [event for event in (read_metrics(file) if file.exists() else []) if event["event"] == kind]


def rewind_metrics(path: Path, update: int, keep: str = "") -> None:
    """Remove events after `update`, except those of kind `keep`; a run that continues from `update` writes them again."""
    if not path.exists():
        return
    kept = [event for event in read_metrics(path) if event.get("update", 0) <= update or event["event"] == keep]
    durable.write(path, "".join(json.dumps(event) + "\n" for event in kept).encode())


def rewind_spans(folder: Path, update: int) -> None:
    """Remove traced spans after `update`, and damaged ones; a run that continues from `update` appends to the rest."""
    for path in folder.glob("rank*.jsonl"):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and _update_of(line) <= update]
        if len(kept) < len(lines):
            durable.write(path, "".join(kept).encode())


def _update_of(span: str) -> float:
    try:
        return float(json.loads(span)["update"])
    except (ValueError, KeyError, TypeError):
        return math.inf
