"""Experiment trackers: what they get, by stand-ins for their packages and by the packages themselves, offline."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
from conftest import Make
from simulated import events
from simulated import run as simulated

from nmt_train import config as configuration
from nmt_train.common.errors import UserError
from nmt_train.common.yaml_file import flatten
from nmt_train.config import Config
from nmt_train.report import convergence
from nmt_train.run import trackers
from nmt_train.run.trackers import TRACKERS, TrackedRun, Trackers
from nmt_train.training.start import start

CHANGES = {"log__every": "1u", "validation__every": "2u"}


def run(config: Config, overwrite: bool = False) -> int:
    return start(config, force=False, overwrite=overwrite)


def numbers(folder: Path) -> list[tuple[str, int, float]]:
    """The names, updates and values of all numbers in metrics.jsonl."""
    return [
        (f"{kind}/{name}", event["update"], value)
        for kind in ("train", "ranks", "validation")
        for event in events(folder, kind)
        for name, value in event.items()
        if isinstance(value, float) and name not in ("seconds", "training_seconds")
    ]


class Recorder:
    """A tracker that keeps what it gets. begun: all of them."""

    begun: ClassVar[list[Recorder]] = []
    identity, url = "first", "https://example.org/first"

    def __init__(self, run: TrackedRun) -> None:
        self.run, self.card = run, ""
        self.numbers_of: list[tuple[str, int, float]] = []
        self.pictures: list[Path] = []
        self.completed: bool | None = None
        self.begun.append(self)

    def numbers(self, values: Mapping[str, float], update: int) -> None:
        self.numbers_of += [(name, update, value) for name, value in values.items()]

    def finish(self, card: str, pictures: Sequence[Path]) -> None:
        self.card, self.pictures = card, list(pictures)

    def close(self, completed: bool) -> None:
        self.completed = completed


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    """A tracker named recorder."""
    monkeypatch.setattr(Recorder, "begun", [])
    monkeypatch.setattr(Recorder, "identity", "first")
    monkeypatch.setitem(TRACKERS, "recorder", (Recorder, "json"))
    return Recorder


@pytest.mark.slow
def test_a_tracker_gets_the_configuration_all_numbers_the_pictures_and_the_model_card(
    make: Make, recorder: type[Recorder]
) -> None:
    config = make(stop__after="4u", log__trackers=["recorder"], **CHANGES)
    folder = Path(config.run)
    assert run(config) == 0
    (first,) = recorder.begun
    assert first.run.keys == {**flatten(configuration.plain(config)), "mode": "single", "replicas.algorithm": "ring"}
    assert first.run.keys["optimizer.learning_rate"] == 0.01
    assert sorted(first.numbers_of) == sorted(numbers(folder))
    assert {"train/cost", "validation/cross-entropy", "ranks/interval"} <= {name for name, *_ in first.numbers_of}
    assert "trained for 4 updates" in first.card
    assert f"cross-entropy on the validation set: {events(folder, 'validation')[-1]['cross-entropy']:.4f}" in first.card
    assert f"nmt-translate --model {folder}" in first.card
    assert (first.pictures, first.completed) == ([], True)
    assert "log.trackers: recorder: https://example.org/first\n" in (folder / "train.log").read_text(encoding="utf-8")
    picture = convergence.plot([folder], "cross-entropy", "seconds", folder / "convergence.png")[0]
    assert run(make(stop__after="6u", log__trackers=["recorder"], **CHANGES)) == 0
    assert recorder.begun[1].pictures == [picture]


@pytest.mark.slow
def test_a_resumed_run_continues_the_tracked_run_and_one_that_starts_over_begins_another(
    make: Make, recorder: type[Recorder]
) -> None:
    for number, after in enumerate(("2u", "4u", "2u")):
        recorder.identity = "first" if number < 2 else "second"
        assert run(make(stop__after=after, log__trackers="recorder", **CHANGES), overwrite=number == 2) == 0
    assert [each.run.identity for each in recorder.begun] == [None, "first", None]
    assert [each.run.update for each in recorder.begun] == [0, 2, 0]
    assert {update for _, update, _ in recorder.begun[1].numbers_of} == {3, 4}
    folder = recorder.begun[0].run.folder
    assert json.loads((folder / trackers.IDENTITIES).read_text(encoding="utf-8")) == {"recorder": "second"}


@pytest.mark.slow
def test_only_the_leader_of_several_ranks_writes(make: Make, tmp_path: Path, recorder: type[Recorder]) -> None:
    folder = simulated(make, tmp_path / "two", [1, 1], mode="sync", stop__after="4u", log__trackers=["recorder"], **CHANGES)
    (only,) = recorder.begun
    assert sorted(only.numbers_of) == sorted(numbers(folder))


@pytest.mark.parametrize("broken", ["__init__", "numbers", "finish", "close"])
def test_a_tracker_that_fails_is_warned_of_once_and_does_not_end_training(
    make: Make, recorder: type[Recorder], monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    calls = []

    def fail(*given: Any) -> None:
        calls.append(given)
        raise ConnectionError("no route to host\nmore")

    monkeypatch.setattr(recorder, broken, fail)
    config = make(stop__after="4u", log__trackers=["recorder"], **CHANGES)
    assert run(config) == 0
    said = (Path(config.run) / "train.log").read_text(encoding="utf-8")
    warning = "warning: log.trackers: recorder failed, and gets nothing more from this start: no route to host\n"
    assert said.count(warning) == said.count("warning: log.trackers") == len(calls) == 1


def test_a_run_that_an_error_ends_is_not_completed(
    make: Make, recorder: type[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> None:
        raise OSError("disk")

    monkeypatch.setattr("nmt_train.training.leader.Leader.start_first_batch", fail)
    with pytest.raises(OSError, match="disk"):
        run(make(stop__after="4u", log__trackers=["recorder"]))
    assert [(each.completed, each.card) for each in recorder.begun] == [(False, "")]


def test_a_tracker_that_hangs_does_not_hold_up_a_finished_run(
    tmp_path: Path, recorder: type[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()
    monkeypatch.setattr(recorder, "numbers", lambda *given: answered.wait())
    monkeypatch.setattr(trackers, "_PATIENCE", 0.0)
    found = Trackers(["recorder"], TrackedRun(tmp_path, {}, {}, 0))
    found.numbers({"train/cost": 1.0}, 1)
    found.close()
    assert list(found.sentences()) == ["warning: log.trackers: recorder did not take everything in 0 s"]
    answered.set()


@pytest.mark.parametrize("name", list(TRACKERS))
def test_a_missing_package_is_one_sentence_that_names_the_extra_and_the_run_stays_as_it_was(
    make: Make, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, TRACKERS[name][1], None)  # as Python marks a module that is missing
    config = make(log__trackers=[name])
    with pytest.raises(UserError, match=rf"^log.trackers: {name} is not installed; pip install '\.\[{name}\]' in"):
        run(config, overwrite=True)
    assert not Path(config.run).exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tensorboard": "true"}, r"unknown key log.tensorboard; write log.trackers: \[tensorboard\], or nothing in place of"),
        ({"trackers": ["tensorbord"]}, "log.trackers: it should be tensorboard, wandb or mlflow, not 'tensorbord'"),
    ],
)
def test_what_is_no_tracker_is_answered_with_what_to_write(make: Make, given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        make(log=given)


@pytest.mark.slow
def test_the_calls_of_wandb(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    logged: list[dict[str, Any]] = []
    saved: list[str] = []

    def init(**given: Any) -> SimpleNamespace:
        made.append(given)
        return SimpleNamespace(
            dir=given["dir"], url=None, define_metric=lambda name, step_metric: made[-1].update(axis=(name, step_metric)),
            log=logged.append, save=lambda file, **_: saved.append(Path(file).read_text(encoding="utf-8")),
            finish=lambda exit_code: made[-1].update(exit_code=exit_code),
        )  # fmt: skip

    fake = ModuleType("wandb")
    monkeypatch.setattr(fake, "init", init, raising=False)
    monkeypatch.setattr(fake, "Settings", lambda silent: {"silent": silent}, raising=False)
    monkeypatch.setattr(fake, "setup", lambda settings: made.append(settings), raising=False)
    monkeypatch.setattr(fake, "Image", lambda path: f"image {path}", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_PROJECT", "translation")
    config = make(stop__after="2u", log__trackers=["wandb"], **CHANGES)
    folder = Path(config.run)
    assert run(config) == 0
    silent, first = made
    assert silent == {"silent": True}, "it does not ask for a key on the terminal"
    assert first["config"]["optimizer"]["learning_rate"] == 0.01
    assert {"project": "translation", "name": "run", "resume": "allow", "exit_code": 0}.items() <= first.items()
    assert first["axis"] == ("*", "update")
    found = [(name, line["update"], value) for line in logged for name, value in line.items() if name != "update"]
    assert sorted(found) == sorted(numbers(folder))
    assert "trained for 2 updates" in saved[0]
    (folder / "curve.png").write_bytes(b"")
    assert run(make(stop__after="3u", log__trackers=["wandb"], **CHANGES)) == 0
    assert made[-1]["id"] == first["id"]
    assert logged[-1] == {"curve": f"image {folder / 'curve.png'}"}


@pytest.mark.slow
def test_the_calls_of_mlflow(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    class Client:
        def __getattr__(self, name: str) -> Any:
            answers = {"get_experiment_by_name": None, "create_experiment": "7"}
            created = SimpleNamespace(info=SimpleNamespace(run_id="abc"))

            def call(*given: Any, **named: Any) -> Any:
                calls.append((name, given, named))
                return created if name == "create_run" else answers.get(name)

            return call

    fake, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    monkeypatch.setattr(fake, "MlflowClient", Client, raising=False)
    for entity in ("Metric", "Param"):
        monkeypatch.setattr(entities, entity, lambda *values: values, raising=False)
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    config = make(stop__after="2u", log__trackers=["mlflow"], **CHANGES, validation__metrics=["chrf++", "cross-entropy"])
    folder = Path(config.run)
    assert run(config) == 0
    parameters = [pair for name, _, named in calls if name == "log_batch" for pair in named.get("params", ())]
    assert dict(parameters)["optimizer.learning_rate"] == "0.01"
    assert all(len(named.get("params", ())) <= 100 for _, _, named in calls)
    metrics = [
        (name, update, value)
        for call, _, named in calls
        if call == "log_batch"
        for name, value, _, update in named.get("metrics", ())
    ]
    assert sorted(metrics) == sorted((name.replace("+", "_"), update, value) for name, update, value in numbers(folder))
    made = [call for call in calls if call[0] in ("create_run", "log_text", "set_terminated")]
    assert made[0] == ("create_run", ("7",), {"run_name": "run"})
    assert made[1][1][2] == "README.md"
    assert made[2] == ("set_terminated", ("abc", "FINISHED"), {})
    assert ("log_artifact", ("abc", str(folder / "config.yml")), {}) in calls
    before = len(calls)
    assert run(make(stop__after="3u", log__trackers=["mlflow"], **CHANGES)) == 0
    assert calls[before] == ("update_run", ("abc",), {"status": "RUNNING"})


@pytest.mark.slow
def test_tensorboard_gets_the_same_values(make: Make) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = make(stop__after="2u", log__trackers="tensorboard", **CHANGES)
    folder = Path(config.run)
    assert run(config) == 0
    convergence.plot([folder], "cross-entropy", "seconds", folder / "convergence.png")
    assert run(make(stop__after="4u", log__trackers="tensorboard", **CHANGES)) == 0
    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    costs = [event["cost"] for event in events(folder, "train")]
    assert [scalar.value for scalar in board.Scalars("train/cost")] == pytest.approx(costs)
    assert [scalar.step for scalar in board.Scalars("validation/cross-entropy")] == [2, 4]
    assert [board.Tensors(f"{name}/text_summary")[0].step for name in ("configuration", "model card")] == [0, 2]
    assert [image.step for image in board.Images("convergence")] == [4]


@pytest.mark.slow
def test_wandb_keeps_a_run_offline(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    config = make(stop__after="2u", log__trackers=["wandb"], **CHANGES)
    folder = Path(config.run)
    assert run(config) == 0
    assert run(make(stop__after="4u", log__trackers=["wandb"], **CHANGES)) == 0
    assert "log.trackers" not in (folder / "train.log").read_text(encoding="utf-8")
    identity = json.loads((folder / trackers.IDENTITIES).read_text(encoding="utf-8"))["wandb"]
    kept = list((folder / "wandb").glob(f"offline-run-*-{identity}"))
    assert kept
    for path in kept:
        assert (path / f"run-{identity}.wandb").stat().st_size > 0
        assert "trained for" in (path / "files" / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_mlflow_has_the_parameters_the_curves_and_the_files_of_a_run(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    changes = {**CHANGES, "validation__metrics": ["cross-entropy", "chrf++"]}
    config = make(stop__after="2u", log__trackers=["mlflow"], **changes)
    folder = Path(config.run)
    assert run(config) == 0
    convergence.plot([folder], "cross-entropy", "seconds", folder / "convergence.png")
    assert run(make(stop__after="4u", log__trackers=["mlflow"], **changes)) == 0
    assert "log.trackers" not in (folder / "train.log").read_text(encoding="utf-8")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("nmt_train")
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("run", "FINISHED")
    assert found.data.params["optimizer.learning_rate"] == "0.01"
    costs = [(event["update"], event["cost"]) for event in events(folder, "train")]
    assert [(point.step, point.value) for point in client.get_metric_history(found.info.run_id, "train/cost")] == costs
    assert [point.step for point in client.get_metric_history(found.info.run_id, "validation/chrf__")] == [2, 4]
    assert {item.path for item in client.list_artifacts(found.info.run_id)} == {"README.md", "config.yml", "convergence.png"}
