"""A run continues only on the text that it was trained on, and compares scores only with those on the same text."""

from __future__ import annotations

import dataclasses
import gzip
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Make
from simulated import FAST, events, parameters, words
from simulated import run as simulated
from virtual import cluster

from nmt_train.common.errors import UserError
from nmt_train.config import Config
from nmt_train.run import checkpoint
from nmt_train.run.stopping import Patience, StopConfig
from nmt_train.simulation.simulate import simulate
from nmt_train.training.start import start

SAME = {"batch__tokens": 300, "checkpoint__every": "100u"}


@pytest.fixture
def corpus(demo: Path, tmp_path: Path) -> Path:
    """A copy of the demo corpus, with a weight for every pair."""
    folder = tmp_path / "corpus"
    shutil.copytree(demo, folder)
    (folder / "weights").write_text("1\n" * 600, encoding="utf-8")
    return folder


def entry(folder: Path, **keys: Any) -> dict[str, Any]:
    return {"files": [f"{folder}/train.en", f"{folder}/train.de"], "sentence_weights": f"{folder}/weights", **keys}


def edit(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    lines = path.read_text(encoding="utf-8").splitlines(True)
    path.write_text("".join(change(lines)), encoding="utf-8")


def log(config: Config) -> str:
    return (Path(config.run) / "train.log").read_text(encoding="utf-8")


CHANGES: dict[str, tuple[Callable[[list[str]], list[str]], tuple[str, ...], str]] = {
    "more pairs": (lambda lines: lines + lines[:7], ("train.en", "train.de", "weights"), "had 600 pairs, now 607"),
    "fewer pairs": (lambda lines: lines[:-9], ("train.en", "train.de", "weights"), "had 600 pairs, now 591"),
    "another order": (lambda lines: lines[::-1], ("train.en", "train.de"), "has other text, sentence weights or"),
    "other weights": (lambda lines: ["2\n", *lines[1:]], ("weights",), "has other text, sentence weights or"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_run_continues_on_another_corpus_only_if_forced_and_then_begins_an_epoch(make: Make, corpus: Path, name: str) -> None:
    change, files, said = CHANGES[name]
    config = make(corpus__train=[entry(corpus, name="mine")], stop__after="4u", **SAME)
    assert start(config, False, False) == 0
    assert checkpoint.load(Path(config.run) / "last").facts["progress"]["epochs"] == 0
    for file in files:
        edit(corpus / file, change)
    longer = make(corpus__train=[entry(corpus, name="mine")], stop__after="6u", **SAME)
    with pytest.raises(UserError, match=rf"another corpus: corpus.train {said}.*continue with a new epoch .* --force"):
        start(longer, False, False)
    assert start(longer, True, False) == 0
    progress = checkpoint.load(Path(config.run) / "last").facts["progress"]
    assert (progress["epochs"], progress["batches"]) == (1, 2)
    assert f"--force: corpus.train {said}" in log(config)
    assert "--force: epoch 2 begins" in log(config)


@pytest.mark.slow
def test_the_same_text_elsewhere_is_the_same_corpus(make: Make, corpus: Path, tmp_path: Path) -> None:
    def config(folder: str, files: list[Any], until: str) -> Config:
        changed = make(corpus__train=[{"files": files}], stop__after=until, **SAME)
        return dataclasses.replace(changed, run=str(tmp_path / folder))

    whole, moved = [f"{corpus}/train.en", f"{corpus}/train.de"], tmp_path / "moved"
    assert start(config("whole", whole, "8u"), False, False) == 0
    assert start(config("parts", whole, "4u"), False, False) == 0
    moved.mkdir()
    lines = (corpus / "train.en").read_text(encoding="utf-8").splitlines(True)
    (moved / "1").write_text("".join(lines[:200]), encoding="utf-8")
    (moved / "2").write_text("".join(lines[200:]), encoding="utf-8")
    (moved / "x.gz").write_bytes(gzip.compress((corpus / "train.de").read_bytes()))
    shutil.rmtree(corpus)
    files = [[f"{moved}/1", f"{moved}/2"], f"{moved}/x.gz"]
    assert start(config("parts", files, "8u"), False, False) == 0
    assert parameters(tmp_path / "parts") == parameters(tmp_path / "whole")


@pytest.mark.parametrize("change", [{"seed": 7}, {"batch__tokens": 500}, {"corpus__window": 99}, {"corpus__max_length": 50}])
def test_settings_that_change_the_batches_begin_an_epoch(make: Make, change: dict[str, Any]) -> None:
    config = make(stop__after="4u", **SAME)
    assert start(config, False, False) == 0
    assert start(make(**{**SAME, "stop__after": "6u", **change}), True, False) == 0
    progress = checkpoint.load(Path(config.run) / "last").facts["progress"]
    assert (progress["epochs"], progress["batches"]) == (1, 2)


def test_other_settings_that_are_forced_leave_the_epoch_alone(make: Make) -> None:
    config = make(stop__after="4u", **SAME)
    assert start(config, False, False) == 0
    assert start(make(stop__after="6u", model__dropout=0.2, **SAME), True, False) == 0
    assert checkpoint.load(Path(config.run) / "last").facts["progress"]["epochs"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "vanilla"])
def test_all_workers_begin_the_epoch_together(make: Make, tmp_path: Path, corpus: Path, mode: str) -> None:
    settings = {"mode": mode, "corpus__train": [entry(corpus)], **SAME}
    epoch = words(simulated(make, tmp_path / "whole", [1, 1], stop__after="1e", places=FAST, **settings))
    folder = simulated(make, tmp_path / "run", [1, 1, 1], stop__after="6u", places=FAST, **settings)
    before = words(folder)
    edit(corpus / "weights", lambda lines: ["2\n", *lines[1:]])
    config = dataclasses.replace(make(**settings, stop__after="3e"), run=str(folder))
    assert simulate(config, cluster([1, 1], **FAST), True, False) == 0
    assert checkpoint.load(folder / "last").facts["progress"]["epochs"] == 3
    assert words(folder) == before + 2 * epoch


VALIDATED: dict[str, Any] = {
    **SAME, "validation__every": "2u", "validation__metrics": ["cross-entropy", "bleu"], "validation__beam": 2,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "forgotten"),
    [
        ({"validation__beam": 3}, "bleu"),
        ({"validation__normalization": 0.5}, "bleu"),
        ({"corpus__valid": ["valid.en", "other.de"]}, "bleu, cross-entropy"),
        ({"validation__every": "1u", "validation__batch_tokens": 100}, ""),
    ],
)
def test_a_best_value_belongs_to_the_set_and_the_settings_that_it_was_measured_with(
    make: Make, corpus: Path, change: dict[str, Any], forgotten: str
) -> None:
    edit(corpus / "valid.en", lambda lines: lines[:3])
    edit(corpus / "valid.de", lambda lines: lines[:3])
    (corpus / "other.de").write_text("qx zw vy\n" * 3, encoding="utf-8")

    def config(until: str, **changes: Any) -> Config:
        files = [f"{corpus}/{name}" for name in changes.pop("corpus__valid", ["valid.en", "valid.de"])]
        return make(**{**VALIDATED, "corpus__valid": files, "stop__after": until, **changes})

    assert start(config("4u"), False, False) == 0
    assert start(config("6u", **change), False, False) == 0
    said = [line.split("forgot the best ")[1].split(":")[0] for line in log(config("6u")).splitlines() if "forgot" in line]
    assert [sorted(text.split(", ")) for text in said] == ([forgotten.split(", ")] if forgotten else [])
    saved = checkpoint.load(Path(config("6u").run) / "last").facts["patience"]
    if "cross-entropy" in forgotten:
        assert saved["cross-entropy"][0] == events(Path(config("6u").run), "validation")[-1]["cross-entropy"]


@pytest.mark.slow
def test_the_same_names_with_other_text_are_another_validation_set(make: Make, corpus: Path) -> None:
    values = {**VALIDATED, "corpus__valid": [f"{corpus}/valid.en", f"{corpus}/valid.de"]}
    config = make(**values, stop__after="4u")
    assert start(config, False, False) == 0
    edit(corpus / "valid.de", lambda lines: ["qx zw vy\n"] * len(lines))
    assert start(make(**values, stop__after="6u"), False, False) == 0
    assert "forgot the best" in log(config)


def test_what_is_not_known_of_a_saved_best_value_does_not_forget_it() -> None:
    patience = Patience(StopConfig(after=["9e"]), tests={"bleu": "new"})  # type: ignore[list-item]
    patience.load({"bleu": [1.0, 2, 0], "chrf": [3.0, 0, 0, "old"]})
    assert patience.forgotten == []
    patience.record({"bleu": 0.5})
    assert patience.state() == {"bleu": [1.0, 3, 0, "new"]}
