"""Experiment trackers: what they get is the configuration, the numbers of all events, pictures and the model card of a run.

A thread calls the trackers, so that a slow server does not delay training. A tracker that raises an error gets no more calls.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from nmt_train.common import atomic_file as durable
from nmt_train.common.errors import UserError

IDENTITIES = "trackers.json"  # of the tracked runs, by tracker; a run that resumes continues them
_PATIENCE = 60.0  # seconds that a finished run waits for its trackers
_PARAMETERS = 100  # the most that MLflow takes at once
_LONGEST = 500  # characters of a parameter that every version of MLflow accepts


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker begins with. config: nested, as in YAML; keys: the same by dotted keys. update: where the run continues.

    identity: that of the tracked run to continue, or None.
    """

    folder: Path
    config: Mapping[str, Any]
    keys: Mapping[str, Any]
    update: int
    identity: str | None = None


class Tracker(Protocol):
    """A run at a tracker, created from a TrackedRun.

    identity: what continues it later, or None if the run folder is enough. url: where to look at it, or None.
    """

    identity: str | None = None
    url: str | None = None

    def numbers(self, values: Mapping[str, float], update: int) -> None:
        """Record numbers, with names such as `train/cost`, at this update."""

    def finish(self, card: str, pictures: Sequence[Path]) -> None:
        """Record the model card (Markdown) and pictures (PNG)."""

    def close(self, completed: bool) -> None:
        """Deliver everything. completed: no error has ended training."""


class _TensorBoard(Tracker):
    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._update = run.update
        # Events after the checkpoint from which a run continues are hidden, because training writes them again.
        purge = run.update + 1 if run.update else None
        self._writer: Any = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge)
        lines = (f"    {name}: {value}" for name, value in run.keys.items())  # a block of code in Markdown
        self._writer.add_text("configuration", "\n".join(lines), self._update)

    def numbers(self, values: Mapping[str, float], update: int) -> None:
        self._update = update
        for name, value in values.items():
            self._writer.add_scalar(name, value, update)

    def finish(self, card: str, pictures: Sequence[Path]) -> None:
        from matplotlib.image import imread

        self._writer.add_text("model card", card, self._update)
        for path in pictures:
            self._writer.add_image(path.stem, imread(path), self._update, dataformats="HWC")

    def close(self, completed: bool) -> None:
        self._writer.close()


class _WandB(Tracker):
    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._wandb = wandb
        self.identity = run.identity or secrets.token_hex(8)
        wandb.setup(wandb.Settings(silent=True))  # it would ask for a key on the terminal, and write between log lines
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "nmt_train"), name=run.folder.resolve().name, id=self.identity,
            resume="allow", dir=str(run.folder), config=dict(run.config), allow_val_change=True,
        )  # fmt: skip
        # The axis is the update: W&B's own steps cannot go back to the checkpoint from which a run continues.
        self._run.define_metric("*", step_metric="update")
        self.url = self._run.url

    def numbers(self, values: Mapping[str, float], update: int) -> None:
        self._run.log({**values, "update": update})

    def finish(self, card: str, pictures: Sequence[Path]) -> None:
        if pictures:
            self._run.log({path.stem: self._wandb.Image(str(path)) for path in pictures})
        file = Path(self._run.dir) / "README.md"
        file.write_text(card, encoding="utf-8")
        self._run.save(str(file), base_path=self._run.dir, policy="now")

    def close(self, completed: bool) -> None:
        self._run.finish(exit_code=0 if completed else 1)


class _MLflow(Tracker):
    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric, self._client = Metric, MlflowClient()
        self._id = self.identity = run.identity or self._create(run, Param)
        self._client.update_run(self._id, status="RUNNING")
        self._client.log_artifact(self._id, str(run.folder / "config.yml"))  # parameters of a run cannot change

    def _create(self, run: TrackedRun, parameter: Callable[[str, str], Any]) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "nmt_train")
        experiment = self._client.get_experiment_by_name(name)
        where = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        identity = str(self._client.create_run(where, run_name=run.folder.resolve().name).info.run_id)
        parameters = [parameter(name, str(value)[:_LONGEST]) for name, value in run.keys.items()]
        for start in range(0, len(parameters), _PARAMETERS):
            self._client.log_batch(identity, params=parameters[start : start + _PARAMETERS])
        return identity

    def numbers(self, values: Mapping[str, float], update: int) -> None:
        now = int(time.time() * 1000)
        # MLflow's names have no other special characters: chrf__ for chrf++, bleu_news for bleu@news.
        metrics = [self._metric(re.sub(r"[^/\w.\- ]", "_", name), value, now, update) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self, card: str, pictures: Sequence[Path]) -> None:
        self._client.log_text(self._id, card, "README.md")
        for path in pictures:
            self._client.log_artifact(self._id, str(path))

    def close(self, completed: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if completed else "FAILED")


# The name of each is that of its extra, too; with the module that it needs.
TRACKERS: Mapping[str, tuple[Callable[[TrackedRun], Tracker], str]] = {
    "tensorboard": (_TensorBoard, "torch.utils.tensorboard"),
    "wandb": (_WandB, "wandb"),
    "mlflow": (_MLflow, "mlflow"),
}


def check_installed(names: Sequence[str]) -> None:
    """Raise UserError if the package of a tracker cannot be imported."""
    for name in names:
        try:
            importlib.import_module(TRACKERS[name][1])
        except ImportError:
            how = f"pip install '.[{name}]' in the project's folder"
            raise UserError(f"log.trackers: {name} is not installed; {how}") from None


class Trackers:
    """The trackers of a run, and the thread that calls them; without names, there is no thread."""

    def __init__(self, names: Sequence[str] = (), run: TrackedRun | None = None) -> None:
        self._names = list(dict.fromkeys(names))  # of the trackers that have not failed
        self._begun: dict[str, Tracker] = {}
        self._calls = SimpleQueue[Callable[[Tracker], None] | None]()
        self._sentences = SimpleQueue[str]()
        self._completed = False
        self._thread: threading.Thread | None = None
        if names and run is not None:
            self._thread = threading.Thread(target=self._serve, args=(run,), name="trackers", daemon=True)
            self._thread.start()

    def numbers(self, values: Mapping[str, float], update: int) -> None:
        if values:
            self._call(lambda tracker: tracker.numbers(values, update))

    def finish(self, card: str, pictures: Sequence[Path]) -> None:
        """No error has ended training."""
        self._completed = True
        self._call(lambda tracker: tracker.finish(card, pictures))

    def sentences(self) -> Iterator[str]:
        """For the log: where to look at the tracked runs, and which trackers have failed, since the last call."""
        while True:
            try:
                yield self._sentences.get_nowait()
            except Empty:
                return

    def close(self) -> None:
        """Deliver everything, but wait only for a limited time."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join(_PATIENCE)
            if self._thread.is_alive():
                late = ", ".join(self._names)
                self._sentences.put(f"warning: log.trackers: {late} did not take everything in {_PATIENCE:.0f} s")
            self._thread = None

    def _call(self, call: Callable[[Tracker], None]) -> None:
        if self._thread is not None:
            self._calls.put(call)

    def _serve(self, run: TrackedRun) -> None:
        for name in list(self._names):
            with self._failing(name):
                self._begun[name] = tracker = _begun(name, run)
                if tracker.url:
                    self._sentences.put(f"log.trackers: {name}: {tracker.url}")
        while (call := self._calls.get()) is not None:
            self._for_all(call)
        self._for_all(lambda tracker: tracker.close(self._completed))

    def _for_all(self, call: Callable[[Tracker], None]) -> None:
        for name in list(self._names):
            with self._failing(name):
                call(self._begun[name])

    @contextmanager
    def _failing(self, name: str) -> Iterator[None]:
        """An error of a tracker is noted, and ends only its own calls."""
        try:
            yield
        except BaseException as error:  # wandb raises KeyboardInterrupt at the end of an input; signals reach another thread
            self._names.remove(name)
            what = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._sentences.put(f"warning: log.trackers: {name} failed, and gets nothing more from this start: {what}")


def _begun(name: str, run: TrackedRun) -> Tracker:
    """Begin or continue the tracked run, and keep its identity."""
    path = run.folder / IDENTITIES
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    tracker = TRACKERS[name][0](replace(run, identity=known.get(name)))
    if tracker.identity is not None and tracker.identity != known.get(name):
        durable.write(path, json.dumps({**known, name: tracker.identity}).encode())
    return tracker
