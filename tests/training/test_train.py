"""Whole runs on a small corpus: continuing, stopping, validating, and what goes wrong while training."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import Make
from hypothesis import given, settings
from hypothesis import strategies as st
from poisoned import poisoned

from nmt_train import config as configuration
from nmt_train.common.errors import NotFinite, UserError
from nmt_train.common.metric import METRICS
from nmt_train.config import Config
from nmt_train.config_text import to_yaml
from nmt_train.load_model import load_model
from nmt_train.model import ModelConfig
from nmt_train.model.beam_search import Hypothesis
from nmt_train.model.metrics import TestSet, ValidationConfig
from nmt_train.model.transformer import Transformer
from nmt_train.optim.gradient_accumulation import GradientAccumulator
from nmt_train.run import checkpoint, log
from nmt_train.run.folder import Run
from nmt_train.run.log import read_metrics
from nmt_train.run.manifest import load_verified
from nmt_train.training import leader as lead_module
from nmt_train.training import worker as train_module
from nmt_train.training.prepared_run import opened
from nmt_train.training.start import start

# Times differ from run to run; nothing else may.
CLOCKS = {"time", "seconds", "training_seconds", "logged_seconds", "words_per_second"}


def run(config: Config, **options: bool) -> int:
    return start(config, **{"force": False, "overwrite": False, **options})


def final(config: Config) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Facts and tensors of a run's last checkpoint, clocks and configuration left out."""
    last = Run(Path(config.run)).last()
    assert last is not None
    saved = checkpoint.load(last)
    facts = {key: value for key, value in saved.facts.items() if key not in ("files", "config")}
    facts["progress"] = {key: value for key, value in facts["progress"].items() if key not in CLOCKS}
    names = [name for name in ("parameters", "smoothed", "optimizer", "random") if saved.has(name)]
    return facts, {f"{name}/{key}": tensor for name in names for key, tensor in saved.tensors(name).items()}


def events(config: Config) -> list[dict[str, Any]]:
    found = read_metrics(Path(config.run) / "metrics.jsonl")
    timed = [event for event in found if event["event"] not in ("ranks", "start")]  # times, and how often it began
    return [{key: value for key, value in event.items() if key not in CLOCKS} for event in timed]


def assert_same(left: Config, right: Config) -> None:
    (left_facts, left_tensors), (right_facts, right_tensors) = final(left), final(right)
    assert left_facts == right_facts
    assert left_tensors.keys() == right_tensors.keys()
    for name, tensor in left_tensors.items():
        assert torch.equal(tensor, right_tensors[name]), name
    assert events(left) == events(right)


ELABORATE = {
    "batch__accumulate": 2, "optimizer__smoothing": 0.1, "log__every": "3u",
    "validation__every": "4u", "validation__metrics": ["cross-entropy", "bleu"], "checkpoint__every": "5u",
    "stop__after": "13u", "corpus__vocabulary": {"size": 120, "sampling": 0.3},
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def no_early_lines() -> Iterator[None]:
    """Log lines after 10 seconds: on a busy machine, some runs would have them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "_EARLY", ())
        yield


@pytest.fixture(scope="module")
def uninterrupted(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Config]:
    from conftest import small

    values = small(demo, tmp_path_factory.mktemp("whole") / "run")
    for name, value in ELABORATE.items():
        section, _, key = name.partition("__")
        values.setdefault(section, {})[key] = value
    config = configuration.validate(values, {})
    assert run(config) == 0
    return values, config


@pytest.mark.slow
@settings(max_examples=6)
@given(stops=st.lists(st.integers(1, 12), min_size=1, max_size=3, unique=True))
def test_interrupted_and_resumed_equals_uninterrupted_bit_for_bit_at_any_update(
    uninterrupted: tuple[dict[str, Any], Config], tmp_path_factory: pytest.TempPathFactory, stops: list[int]
) -> None:
    """Dropout, subword sampling, accumulation across epochs, smoothing, logs and patience included."""
    values, whole = uninterrupted
    pieces = configuration.validate({**values, "run": str(tmp_path_factory.mktemp("pieces") / "run")}, {})
    for update in sorted(stops):
        with interrupted_after(update):
            assert run(pieces) == 128 + signal.SIGTERM
    assert run(pieces) == 0
    assert_same(pieces, whole)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [5, 6])
def test_interrupted_while_gradients_are_added_up_equals_uninterrupted(
    uninterrupted: tuple[dict[str, Any], Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    values, whole = uninterrupted
    pieces = configuration.validate({**values, "run": str(tmp_path / "run")}, {})
    original, batches = train_module.Worker.decay, itertools.count(1)

    def decay(worker: Any, epochs: float) -> None:
        if next(batches) == batch:  # an update has two batches
            os.kill(os.getpid(), signal.SIGTERM)
        original(worker, epochs)

    with monkeypatch.context() as patched:
        patched.setattr(train_module.Worker, "decay", decay)
        assert run(pieces) == 128 + signal.SIGTERM
    assert final(pieces)[0]["progress"]["updates"] == 3
    assert run(pieces) == 0
    assert_same(pieces, whole)


class interrupted_after:  # noqa: N801 - reads as a phrase
    """SIGTERM arrives while update number `update` is made."""

    def __init__(self, update: int) -> None:
        self.update = update

    def __enter__(self) -> None:
        self.patch = pytest.MonkeyPatch()
        original, update = lead_module.Leader._after_update, self.update

        def after_update(leader: Any) -> None:
            if leader._worker.strategy.updates == update:
                os.kill(os.getpid(), signal.SIGTERM)
            original(leader)

        self.patch.setattr(lead_module.Leader, "_after_update", after_update)

    def __exit__(self, *error: object) -> None:
        self.patch.undo()


@pytest.mark.slow
def test_a_signal_during_validation_puts_it_off_to_the_restart(
    uninterrupted: tuple[dict[str, Any], Config], tmp_path: Path
) -> None:
    values, whole = uninterrupted
    pieces = configuration.validate({**values, "run": str(tmp_path / "run")}, {})
    assert_put_off(pieces, whole)


@pytest.mark.slow
def test_also_if_a_checkpoint_is_written_at_the_same_update(
    uninterrupted: tuple[dict[str, Any], Config], tmp_path: Path
) -> None:
    values, _ = uninterrupted
    values = {**values, "checkpoint": {**values["checkpoint"], "every": values["validation"]["every"]}}
    whole, pieces = (configuration.validate({**values, "run": str(tmp_path / name)}, {}) for name in ("whole", "pieces"))
    assert run(whole) == 0
    assert_put_off(pieces, whole)


def assert_put_off(pieces: Config, whole: Config) -> None:
    with pytest.MonkeyPatch.context() as patch:
        translate = TestSet.translate

        def interrupted(*arguments: Any) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            return translate(*arguments)

        patch.setattr(TestSet, "translate", interrupted)
        assert run(pieces) == 128 + signal.SIGINT
    facts, _ = final(pieces)
    assert (facts["validation_pending"], facts["progress"]["updates"]) == (True, 4)
    assert run(pieces) == 0
    assert_same(pieces, whole)
    links = [{path.name: path.readlink() for path in Path(its.run).iterdir() if path.is_symlink()} for its in (pieces, whole)]
    assert links[0] == links[1]
    assert {"best-cross-entropy", "last"} <= links[0].keys()


@pytest.mark.slow
def test_killed_at_once_the_run_continues_from_its_last_checkpoint(
    uninterrupted: tuple[dict[str, Any], Config], tmp_path: Path
) -> None:
    values, whole = uninterrupted
    pieces = configuration.validate({**values, "run": str(tmp_path / "run")}, {})
    with pytest.MonkeyPatch.context() as patch:
        finish, saves = checkpoint.Draft.finish, iter([False, False, True])

        def finish_and_die(*arguments: Any) -> None:
            if arguments[0].folder.parent.name == "best":
                return finish(*arguments)
            finish(*arguments)
            if next(saves):
                raise SystemExit(9)  # before links are set and old checkpoints pruned

        patch.setattr(checkpoint.Draft, "finish", finish_and_die)
        with pytest.raises(SystemExit):
            run(pieces)
    assert run(pieces) == 0
    assert_same(pieces, whole)


def command(config: Config, folder: Path) -> list[str]:
    path = folder / "config.yml"
    path.write_text(to_yaml(config), encoding="utf-8")
    return [sys.executable, "-c", "from nmt_train.cli.train import main; main()", "--config", str(path)]


def lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stderr is not None
    yield from iter(process.stderr.readline, "")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_save_and_exit_as_a_shell_expects(make: Make, tmp_path: Path, number: signal.Signals) -> None:
    config = make(stop__after="1000e", log__every="1u", checkpoint__every="1000u")
    process = subprocess.Popen(command(config, tmp_path), stderr=subprocess.PIPE, text=True)
    output = []
    for line in lines(process):
        output.append(line)
        if "Up. 3 " in line:
            process.send_signal(number)
    assert process.wait(timeout=60) == 128 + number, output
    facts, _ = final(config)
    assert facts["progress"]["updates"] >= 3
    assert any(f"{number.name} received" in line for line in output)


# Makes its standard input the terminal of its session, and becomes the command in its arguments.
ON_TERMINAL = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"


@pytest.mark.slow
@pytest.mark.usefixtures("without_nohup")
def test_a_closed_terminal_loses_nothing(make: Make, tmp_path: Path) -> None:
    config = make(stop__after="1000e", log__every="1u", checkpoint__every="1000u")
    ours, its = os.openpty()
    termios.tcsetwinsize(its, (24, 80))
    given = [sys.executable, "-c", ON_TERMINAL, *command(config, tmp_path)]
    process = subprocess.Popen(given, stdin=its, stdout=its, stderr=its, start_new_session=True)
    os.close(its)
    shown = ""
    while "Up. 3 " not in shown:
        shown += os.read(ours, 1000).decode(errors="replace")
    assert "elapsed" in shown, "there is a progress bar"
    os.close(ours)
    try:
        assert process.wait(timeout=60) == 128 + signal.SIGHUP
    finally:
        process.kill()
    assert final(config)[0]["progress"]["updates"] >= 3


@pytest.mark.slow
def test_nohup_outlives_the_terminal(make: Make, tmp_path: Path) -> None:
    config = make(stop__after="6u", log__every="1u")
    process = subprocess.Popen(
        ["nohup", *command(config, tmp_path)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    for line in lines(process):
        if "Up. 3 " in line:
            process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=60) == 0
    assert final(config)[0]["progress"]["updates"] == 6


@pytest.mark.slow
def test_sigkill_while_saving_all_the_time_leaves_a_good_checkpoint(make: Make, tmp_path: Path) -> None:
    config = make(stop__after="1000e", log__every="1u", checkpoint__every="1u", checkpoint__keep=2)
    reached = 0
    for wanted in (4, 9):
        process = subprocess.Popen(command(config, tmp_path), stderr=subprocess.PIPE, text=True)
        for line in lines(process):
            if f"Up. {wanted} " in line:
                process.kill()
                break
        process.wait(timeout=60)
        saved = final(config)[0]["progress"]["updates"]
        assert saved > reached
        reached = saved


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_said_aloud_and_the_one_before_is_used(
    uninterrupted: tuple[dict[str, Any], Config], tmp_path: Path
) -> None:
    values, whole = uninterrupted
    pieces = configuration.validate({**values, "run": str(tmp_path / "run")}, {})
    assert run(configuration.validate({**values, "run": str(tmp_path / "run"), "stop": {"after": "10u"}}, {})) == 0
    newest = Run(Path(pieces.run)).last()
    assert newest is not None
    (newest / "optimizer.safetensors").write_bytes(b"short")
    assert run(pieces) == 0
    said = (Path(pieces.run) / "train.log").read_text(encoding="utf-8")
    assert "warning: " in said
    assert "optimizer.safetensors: has 5 bytes instead of" in said
    assert final(pieces)[1].keys() == final(whole)[1].keys()
    for path in Run(Path(pieces.run)).checkpoints():
        (path / "optimizer.safetensors").write_bytes(b"short")
    with pytest.raises(UserError, match="no checkpoint of the run is intact"):
        run(pieces)


def test_a_start_without_a_checkpoint_leaves_its_vocabulary_only_for_the_same_corpus(make: Make, demo: Path) -> None:
    config = make(stop__after="2u")
    folder = Path(config.run)
    assert run(config) == 0
    before = (folder / "vocabulary.model").read_bytes()
    shutil.rmtree(folder / "checkpoints")
    for link in ("last", *(path.name for path in folder.glob("best-*"))):
        (folder / link).unlink(missing_ok=True)
    (folder / "metrics.jsonl").unlink()
    with opened(config, False, False) as ready:
        assert ready.vocabulary.model == before
    swapped = make(stop__after="2u", corpus__vocabulary={"size": len(ready.vocabulary), "type": "bpe"})
    with opened(swapped, False, False) as ready:
        assert ready.vocabulary.model != before


def test_a_changed_configuration_is_refused_with_the_difference_unless_harmless_or_forced(make: Make) -> None:
    run(make(stop__after="2u"))
    with pytest.raises(UserError, match=r"started with another configuration: optimizer\.learning_rate was 0\.01, now 0\.5"):
        run(make(stop__after="3u", optimizer__learning_rate=0.5))
    assert run(make(stop__after="3u", log__every="1u", checkpoint__keep=1, trace=True)) == 0
    changed = make(stop__after="4u", optimizer={"learning_rate": 0.5, "warmup": 5})
    assert run(changed, force=True) == 0
    assert final(changed)[0]["progress"]["updates"] == 4
    with pytest.raises(
        UserError, match=r"^optimizer.name: run .* has begun with adam, and its checkpoints do not fit sgd; add"
    ):
        run(make(stop__after="5u", optimizer__name="sgd"), force=True)
    with pytest.raises(UserError, match=r"cannot change what it began with, .*: model.dim was 16, now 32"):
        run(make(stop__after="5u", model__dim=32), force=True)
    assert run(make(stop__after="2u", model__dim=32), overwrite=True) == 0


def test_a_mode_with_another_optimizer_is_refused_and_leaves_the_run_as_it_was(make: Make) -> None:
    config = make(stop__after="2u")
    run(config)
    before = {path.name: path.read_bytes() for path in Path(config.run).iterdir() if path.is_file()}
    with pytest.raises(UserError, match=r"do not fit adagrad, which mode downpour uses; add --optimizer.name adam, or choose"):
        run(make(stop__after="4u", mode="downpour"))
    assert {path.name: path.read_bytes() for path in Path(config.run).iterdir() if path.is_file()} == before
    assert run(make(stop__after="4u", mode="downpour", optimizer__name="adam")) == 0


def test_an_optimizer_with_the_same_state_needs_only_force(make: Make) -> None:
    run(make(stop__after="2u"))
    with pytest.raises(UserError, match=r"optimizer.name was adam, now adamw; restore it, .* or continue anyway with --force"):
        run(make(stop__after="4u", optimizer__name="adamw"))
    assert run(make(stop__after="4u", optimizer__name="adamw"), force=True) == 0


def test_a_finished_run_says_so_and_does_nothing(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    config = make(stop__after="2u")
    run(config)
    before = final(config)
    capsys.readouterr()
    assert run(config) == 0
    assert "stop.after 2u reached" in capsys.readouterr().err
    assert final(config)[0] == before[0]


@pytest.mark.slow
def test_the_run_folder_holds_what_is_promised(make: Make) -> None:
    config = make(
        stop__after="1e", validation={"every": "1u", "metrics": list(METRICS)}, trace=True, replicas__algorithm="ring"
    )
    run(config)
    folder = Path(config.run)
    names = {path.name for path in folder.iterdir()}
    expected = {"config.yml", "train.log", "metrics.jsonl", "trace", "vocabulary.model", "checkpoints", "last", "translations"}
    assert expected | {"best-chrf", "best-chrf++", "best-ter", "best-cross-entropy", "best-perplexity"} <= names
    assert configuration.load([str(folder / "config.yml")], {}) == config
    assert yaml.safe_load((folder / "config.yml").read_text(encoding="utf-8"))["model"]["dim"] == 16
    assert (folder / "last" / "checkpoint.json").exists()
    facts, _ = final(config)
    log = (folder / "train.log").read_text(encoding="utf-8")
    assert "bleu : 0.0000 : no best yet" in log
    assert not {"best-bleu", "best-exact-match"} & names, "a model that translates nothing is not the best one"
    assert "best bleu" not in log
    translations = (folder / "translations" / f"{facts['progress']['updates']}.txt").read_text(encoding="utf-8")
    assert len(translations.split("\n")) == 20 + 1
    assert facts["progress"]["epochs"] == 1


def test_smoothed_parameters_are_what_is_validated_and_translated_with(make: Make) -> None:
    config = make(stop__after="6u", optimizer__smoothing=0.05, validation__every="6u")
    run(config)
    last = Run(Path(config.run)).last()
    assert last is not None
    model, vocabulary, _ = load_model([last], torch.device("cpu"))
    saved = checkpoint.load(last)
    assert torch.equal(dict(model.named_parameters())["target_embedding"], saved.tensors("smoothed")["target_embedding"])
    test_set = TestSet(config.corpus.valid, "corpus.valid", vocabulary)
    logged = events(config)[-1]["cross-entropy"]
    assert test_set.measure(model, config.validation).values["cross-entropy"] == pytest.approx(logged, abs=1e-6)


def test_averaging_checkpoints_is_the_mean_of_their_parameters(make: Make) -> None:
    config = make(stop__after="4u", checkpoint__every="1u", checkpoint__keep=3)
    run(config)
    paths = Run(Path(config.run)).checkpoints()
    assert len(paths) == 3
    model, _, _ = load_model(paths, torch.device("cpu"))
    mean = sum(checkpoint.load(path).tensors("parameters")["target_embedding"] for path in paths) / 3
    torch.testing.assert_close(dict(model.named_parameters())["target_embedding"].detach(), mean)


def test_cross_entropy_per_word_does_not_depend_on_how_sentences_are_batched(make: Make) -> None:
    config = make(stop__after="2u")
    run(config)
    last = Run(Path(config.run)).last()
    assert last is not None
    model, vocabulary, _ = load_model([last], torch.device("cpu"))
    test_set = TestSet(config.corpus.valid, "corpus.valid", vocabulary)
    values = [
        test_set.measure(model, make(validation={"metrics": ["cross-entropy"], "batch_tokens": tokens}).validation).values
        for tokens in (1, 100, 100_000)
    ]
    assert values[1] == pytest.approx(values[0], rel=1e-5)
    assert values[2] == pytest.approx(values[0], rel=1e-5)


def test_a_pair_with_a_long_source_takes_no_more_memory_than_others(
    tmp_path: Path, vocabulary: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ["six"] * 200 + ["six " * 900] + ["six"] * 200
    target = ["twelve"] * 201 + ["twelve twelve"] * 200
    for name, lines in (("source", source), ("target", target)):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    model = Transformer(ModelConfig(encoder_layers=1, decoder_layers=1, dim=4, ffn_dim=4, heads=2), len(vocabulary))
    original, shapes = Transformer.cross_entropy, []

    def remember(model: Transformer, batch: Any) -> torch.Tensor:
        shapes.append((len(batch), max(batch.source.shape[1], batch.target_out.shape[1])))
        return original(model, batch)

    monkeypatch.setattr(Transformer, "cross_entropy", remember)
    test_set = TestSet([str(tmp_path / "source"), str(tmp_path / "target")], "corpus.valid", vocabulary)
    test_set.measure(model, ValidationConfig(metrics=["cross-entropy"], batch_tokens=2000))
    assert sum(sentences for sentences, _ in shapes) == len(source)
    assert max(longest for _, longest in shapes) > 900
    assert all(sentences == 1 or sentences * longest <= 2000 for sentences, longest in shapes)
    assert len(shapes) < 10


def test_metrics_are_of_translations_of_the_whole_source(
    tmp_path: Path, vocabulary: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, line in (("source", "six " * 1500), ("target", "twelve")):
        (tmp_path / name).write_text(line + "\n", encoding="utf-8")
    model = Transformer(ModelConfig(encoder_layers=1, decoder_layers=1, dim=4, ffn_dim=4, heads=2), len(vocabulary))
    seen = []

    def search(model: Transformer, ids: torch.Tensor, *others: Any) -> list[list[Hypothesis]]:
        seen.append(ids.shape[1])
        return [[Hypothesis([], 0.0, 0.0)]]

    monkeypatch.setattr("nmt_train.model.translator.search", search)
    test_set = TestSet([str(tmp_path / "source"), str(tmp_path / "target")], "corpus.valid", vocabulary)
    assert test_set.translate(model, ValidationConfig()) == [""]
    assert seen == [len(vocabulary.encode(["six " * 1500])[0]) + 1]
    assert seen[0] > 1500


class broken:  # noqa: N801 - reads as a phrase
    """The parameters are not finite after this number of updates."""

    def __init__(self, after: int) -> None:
        self.after = after

    def __enter__(self) -> None:
        self.patch = pytest.MonkeyPatch()
        original = lead_module.Leader.step_done

        def step_done(leader: Any, updated: bool) -> None:
            if leader._worker.strategy.updates == self.after:
                leader._worker.flat.parameters.fill_(float("nan"))
            original(leader, updated)

        self.patch.setattr(lead_module.Leader, "step_done", step_done)

    def __exit__(self, *error: object) -> None:
        self.patch.undo()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_naming_update_and_batch_and_keeps_the_checkpoint(make: Make, value: float) -> None:
    config = make(stop__after="10u", checkpoint__every="2u")
    with (
        poisoned([4], value),
        pytest.raises(NotFinite, match=r"update 4, batch \d+ of epoch \d+ \(corpus.train, lines \d+, .*not_finite: skip"),
    ):
        run(config)
    facts, tensors = final(config)
    assert facts["progress"]["updates"] == 2
    assert all(bool(tensor.isfinite().all()) for tensor in tensors.values() if tensor.is_floating_point())


def test_or_the_batch_is_skipped_said_aloud_and_training_goes_on(make: Make) -> None:
    config = make(stop__after="10u", optimizer__not_finite="skip", log__every="1u")
    with poisoned([4], float("nan")):
        assert run(config) == 0
    facts, tensors = final(config)
    assert (facts["progress"]["updates"], facts["progress"]["skipped"]) == (10, 1)
    assert all(bool(tensor.isfinite().all()) for tensor in tensors.values() if tensor.is_floating_point())
    assert "skipped: update 4, batch " in (Path(config.run) / "train.log").read_text(encoding="utf-8")
    assert all(event["cost"] < 100 for event in events(config) if event["event"] == "train")


def test_checkpoints_can_be_read_although_the_cost_of_a_skipped_batch_was_not_finite(make: Make) -> None:
    config = make(
        stop__after="4u", batch__accumulate=2, optimizer__not_finite="skip", log__every="3u", checkpoint__every="1u",
        checkpoint__keep=9,
    )  # fmt: skip
    with poisoned([3], float("nan")):  # the first batch of a sum
        assert run(config) == 0
    assert final(config)[0]["progress"]["skipped"] == 1
    for path in Run(Path(config.run)).checkpoints():
        load_verified(path)
    assert all(event["cost"] < 100 for event in events(config) if event["event"] == "train")


@pytest.mark.slow
def test_an_epoch_whose_last_batch_is_skipped_ends_the_run_too(make: Make) -> None:
    batches = make(stop__after="1e", log__every="1u")
    assert run(batches) == 0
    number = final(batches)[0]["progress"]["updates"]
    config = dataclasses.replace(make(stop__after="1e", optimizer__not_finite="skip"), run=f"{batches.run}-skipped")
    with poisoned([number], float("nan")):
        assert run(config) == 0
    progress = final(config)[0]["progress"]
    assert (progress["updates"], progress["skipped"], progress["epochs"], progress["batches"]) == (number - 1, 1, 1, 0)


@pytest.mark.slow
def test_a_stage_does_not_end_training_before_the_next_one_begins(make: Make, demo: Path) -> None:
    """When a stage ends, the next one has not begun, so no validation of the next one can have been no better."""
    files = [f"{demo}/train.en", f"{demo}/train.de"]
    config = make(
        corpus__train=[{"files": files, "until": "2e"}, {"files": files}], optimizer__learning_rate=1e-30,
        validation__every="1e", stop__patience=1, stop__after="9e",
    )  # fmt: skip
    assert run(config) == 0
    assert final(config)[0]["progress"]["epochs"] == 3


@pytest.mark.slow
def test_but_not_for_ever(make: Make) -> None:
    config = make(stop__after="100u", optimizer__not_finite="skip", checkpoint__every="1u")
    with poisoned(range(3, 1000), float("nan")), pytest.raises(NotFinite, match=r"update 3, .*; 50 were skipped before it"):
        run(config)
    assert final(config)[0]["progress"]["updates"] == 2


@pytest.mark.parametrize("metric", ["cross-entropy", "chrf"])
def test_a_validation_of_a_model_that_gives_no_probabilities_ends_the_run_and_keeps_the_checkpoint(
    make: Make, metric: str
) -> None:
    config = make(stop__after="10u", checkpoint__every="2u", validation={"every": "3u", "metrics": [metric]})
    with broken(after=3), pytest.raises(NotFinite, match=r"the model gives no probabilities: its parameters are not finite"):
        run(config)
    facts, tensors = final(config)
    assert facts["progress"]["updates"] == 2
    assert all(bool(tensor.isfinite().all()) for tensor in tensors.values() if tensor.is_floating_point())


def test_parameters_that_are_not_finite_are_not_saved(make: Make) -> None:
    config = make(stop__after="10u", checkpoint__every="2u")
    with (
        broken(after=4),
        pytest.raises(UserError, match=r"(update 4: parameters are|cost nan).*; earlier checkpoints are intact"),
    ):
        run(config)
    assert final(config)[0]["progress"]["updates"] == 2


def test_accumulating_two_batches_is_one_update_of_the_mean_of_their_tokens(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(
        batch__accumulate=2, stop__after="1u", model__dropout=0.0,
        optimizer={"name": "sgd", "learning_rate": 1.0, "warmup": 0, "schedule": "constant", "clip_norm": 0},
    )  # fmt: skip
    gradients: list[torch.Tensor] = []
    tokens: list[int] = []
    original, add = torch.Tensor.backward, GradientAccumulator.add

    def backward(loss: torch.Tensor, *arguments: Any) -> None:
        original(loss, *arguments)
        gradients.append(workers[0].flat.gradient.clone())

    def counted(accumulator: GradientAccumulator, count: int) -> float:
        tokens.append(count)
        return add(accumulator, count)

    monkeypatch.setattr(GradientAccumulator, "add", counted)
    workers: list[Any] = []
    begin = train_module.Worker.__init__

    def remember(worker: Any, *arguments: Any) -> None:
        begin(worker, *arguments)
        workers.append(worker)
        starts.append(worker.flat.parameters.clone())

    starts: list[torch.Tensor] = []
    monkeypatch.setattr(train_module.Worker, "__init__", remember)
    monkeypatch.setattr(torch.Tensor, "backward", backward)
    run(config)
    assert tokens[0] != tokens[1]
    mean = gradients[1] * tokens[0] / sum(tokens)  # what has piled up is in units of the first batch
    torch.testing.assert_close(workers[0].flat.parameters, starts[0] - mean)


@pytest.mark.slow
def test_training_learns(make: Make) -> None:
    config = make(
        stop__after="80u", batch__tokens=3000, validation__every="40u", log__every="20u",
        model={"preset": "tiny", "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0},
    )  # fmt: skip
    run(config)
    entropies = [event["cross-entropy"] for event in events(config) if event["event"] == "validation"]
    costs = [event["cost"] for event in events(config) if event["event"] == "train"]
    assert costs[-1] < 0.7 * costs[0]
    assert entropies[-1] < entropies[0] < 4


def test_early_stopping_ends_the_run(make: Make) -> None:
    config = make(
        optimizer={"learning_rate": 1e-12, "warmup": 0}, validation__every="1u", log__every="1u", checkpoint__every="100u",
        stop={"after": "50u", "patience": 2}, model__dropout=0.0,
    )  # fmt: skip
    run(config)
    facts, _ = final(config)
    assert facts["progress"]["updates"] < 50
    assert facts["patience"]["cross-entropy"][1] == 2


def test_training_lets_no_time_go_uncounted(make: Make) -> None:
    config = make(stop__after="4u", validation__every="2u")
    begin = time.perf_counter()
    run(config)
    last = Run(Path(config.run)).last()
    assert last is not None
    progress = checkpoint.load(last).facts["progress"]
    assert 0 < progress["training_seconds"] < progress["seconds"] < time.perf_counter() - begin


@pytest.mark.slow
def test_a_run_goes_on_with_its_own_vocabulary_from_any_path_and_with_no_other(make: Make, tmp_path: Path) -> None:
    assert run(make(stop__after="1u")) == 0
    path = str(tmp_path / "own.model")
    shutil.copy(Path(make().run) / "vocabulary.model", path)
    assert run(make(stop__after="2u", corpus__vocabulary__path=path)) == 0
    small_one = make(corpus__vocabulary__size=90, run=str(tmp_path / "other"), stop__after="1u")
    assert run(small_one) == 0
    other = str(Path(small_one.run) / "vocabulary.model")
    for force in (False, True):
        with pytest.raises(
            UserError, match="is not the vocabulary that run .* began with .*; remove the key, or choose another"
        ):
            run(make(stop__after="3u", corpus__vocabulary__path=other), force=force)
