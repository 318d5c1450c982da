"""A new run that begins with the parameters of another one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Make
from simulated import events, run

from nmt_train.common.errors import TRY_AGAIN, UserError
from nmt_train.corpus.new_pieces import extended
from nmt_train.load_model import load_model
from nmt_train.model.metrics import ValidationConfig
from nmt_train.report.table import measure
from nmt_train.training.prepared_run import opened, taken_over
from nmt_train.training.start import start

CPU = torch.device("cpu")


def trained(make: Make, tmp_path: Path, name: str = "source", **changes: Any) -> Path:
    changes = {"stop__after": "12u", "checkpoint__every": "6u", **changes}
    assert start(dataclasses.replace(make(**changes), run=str(tmp_path / name)), False, False) == 0
    return tmp_path / name


def cross_entropy(path: Path) -> float:
    (row,) = measure([path], None, None, ValidationConfig(metrics=["cross-entropy"]), CPU)
    return float(row["cross-entropy"])


def manifest(path: Path) -> dict[str, Any]:
    return dict(json.loads((path / "checkpoint.json").read_text()))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_it_begins_as_good_as_its_source_and_counts_from_zero(make: Make, tmp_path: Path, smoothing: float) -> None:
    source = trained(make, tmp_path, optimizer__smoothing=smoothing)
    fine = trained(make, tmp_path, "fine", init=str(source), seed=2, validation__every="6u", checkpoint__keep=9)
    before = cross_entropy(source / "last")
    assert cross_entropy(fine / "checkpoints" / "0") == before
    validations = events(fine, "validation")
    assert [event["update"] for event in validations] == [0, 6, 12]
    assert validations[0]["cross-entropy"] == pytest.approx(before)
    assert validations[-1]["cross-entropy"] < before
    assert (fine / "vocabulary.model").read_bytes() == (source / "vocabulary.model").read_bytes()
    assert manifest(fine / "last")["optimizer"]["updates"] == 12


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["vanilla", "sparse-overlap", "sync", "easgd"])
def test_every_mode_begins_with_it(make: Make, tmp_path: Path, mode: str) -> None:
    source = trained(make, tmp_path)
    fine = run(make, tmp_path / "fine", [1, 1], init=str(source / "last"), mode=mode, validation__every="6u")
    assert events(fine, "validation")[0]["cross-entropy"] == pytest.approx(cross_entropy(source / "last"))


@pytest.mark.slow
def test_its_history_names_where_it_comes_from_through_generations(make: Make, tmp_path: Path) -> None:
    first = trained(make, tmp_path, "first")
    second = trained(make, tmp_path, "second", init=str(first))
    third = trained(make, tmp_path, "third", init=str(second / "checkpoints" / "6"))
    history = manifest(third / "last")["history"]
    assert [(Path(step["init"]), step["updates"]) for step in history] == [
        (first / "checkpoints" / "12", 12),
        (second / "checkpoints" / "6", 6),
    ]
    assert f"init: {second / 'checkpoints' / '6'}" in (third / "config.yml").read_text()


@pytest.mark.slow
def test_it_resumes_without_its_source(make: Make, tmp_path: Path) -> None:
    source = trained(make, tmp_path)
    whole = trained(make, tmp_path, "whole", init=str(source))
    parts = trained(make, tmp_path, "parts", init=str(source), stop__after="6u")
    source.rename(tmp_path / "elsewhere")
    trained(make, tmp_path, "parts", init=str(source))
    read = [(path / "last" / "parameters.safetensors").read_bytes() for path in (whole, parts)]
    assert read[0] == read[1]


def test_what_the_section_model_leaves_out_is_as_in_its_source(make: Make, tmp_path: Path) -> None:
    sizes = {"encoder_layers": 1, "decoder_layers": 2, "dim": 16, "ffn_dim": 24, "heads": 2}
    model = {**sizes, "norm": "post", "conventions": "marian", "tied": "target-output", "activation": "swish", "dropout": 0.2}
    source = trained(make, tmp_path, model=model)
    fine = {"init": str(source), "model": {}, "checkpoint__keep": 9, "validation__every": "6u"}
    trained(make, tmp_path, "fine", **fine)
    assert manifest(tmp_path / "fine" / "last")["config"]["model"] == manifest(source / "last")["config"]["model"]
    assert cross_entropy(tmp_path / "fine" / "checkpoints" / "0") == cross_entropy(source / "last")
    log = (tmp_path / "fine" / "train.log").read_text(encoding="utf-8")
    assert "decided: model.preset small, model.encoder_layers 1, model.decoder_layers 2, model.dim 16" in log
    assert "model.norm post, model.tied target-output, model.activation swish, model.conventions marian" in log
    trained(make, tmp_path, "fine", **fine, stop__after="15u")
    assert manifest(tmp_path / "fine" / "last")["optimizer"]["updates"] == 15
    with pytest.raises(UserError, match=r"init: .* needs model.norm post \(here pre\); remove these keys, which then are"):
        trained(make, tmp_path, "other", init=str(source), model={"norm": "pre"})
    with pytest.raises(UserError, match=r"needs .* model.dim 16 \(here 128\), .*; remove these keys and model.preset, which"):
        trained(make, tmp_path, "other", init=str(source), model={"preset": "tiny"})


def test_a_model_that_does_not_fit_is_refused_by_its_sizes(make: Make, tmp_path: Path) -> None:
    source = trained(make, tmp_path)
    with pytest.raises(UserError, match=r"needs model.dim 16 \(here 32\), model.norm pre \(here post\); remove these keys,"):
        trained(make, tmp_path, "fine", init=str(source), model__dim=32, model__norm="post")
    other = trained(make, tmp_path, "other", corpus__vocabulary__size=110)
    with pytest.raises(UserError, match=r"corpus.vocabulary.path: .* is not the vocabulary of .*, which init names"):
        trained(make, tmp_path, "fine", init=str(source), corpus__vocabulary__path=str(other / "vocabulary.model"))
    with pytest.raises(UserError, match="holds no checkpoint|does not exist"):
        trained(make, tmp_path, "fine", init=str(tmp_path / "nothing"))
    assert not (tmp_path / "fine" / "last").exists()


def test_new_pieces_are_added_and_everything_else_is_as_in_its_source(make: Make, tmp_path: Path, demo: Path) -> None:
    source = trained(make, tmp_path)
    part = {"files": [f"{demo}/train.en", f"{demo}/train.de"], "tag": "<2de>"}
    new = {"corpus__train": [part], "corpus__valid": [part], "corpus__vocabulary": {"user_defined": ["<2de>", "<name>"]}}
    fine = trained(make, tmp_path, "fine", init=str(source), checkpoint__keep=9, validation__every="6u", **new)
    scores = [event["cross-entropy"] for event in events(fine, "validation")]
    assert scores[-1] < scores[0]
    before, after = (load_model([path], CPU) for path in (source / "last", fine / "checkpoints" / "0"))
    size = len(before[1])
    assert [after[1].piece(number) for number in range(size, len(after[1]))] == ["<2de>", "<name>"]
    assert torch.equal(after[0].target_embedding[:size], before[0].target_embedding)
    trained(make, tmp_path, "fine", init=str(source), stop__after="15u", **new)
    with pytest.raises(UserError, match=r"cannot change what it began with.*corpus.vocabulary.user_defined was"):
        trained(make, tmp_path, "fine", init=str(source), stop__after="20u", corpus__train=[part], corpus__valid=[part])


def test_a_longer_vocabulary_is_taken_if_it_begins_with_that_of_its_source(make: Make, tmp_path: Path) -> None:
    source = trained(make, tmp_path)
    vocabulary = load_model([source / "last"], CPU)[1]
    (tmp_path / "longer.model").write_bytes(extended(vocabulary, ["<name>"]).model)
    fine = trained(make, tmp_path, "fine", init=str(source), corpus__vocabulary={"path": str(tmp_path / "longer.model")})
    assert len(load_model([fine / "last"], CPU)[1]) == len(vocabulary) + 1
    with pytest.raises(UserError, match="nor one that begins with its pieces; remove the key"):
        trained(make, tmp_path, "back", init=str(fine), corpus__vocabulary={"path": str(source / "vocabulary.model")})


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "sparse-overlap"])
def test_several_workers_train_new_pieces(make: Make, tmp_path: Path, mode: str) -> None:
    source = trained(make, tmp_path)
    fine = run(
        make, tmp_path / "fine", [1, 1], init=str(source), mode=mode, stop__after="30u", validation__every="10u",
        corpus__vocabulary={"user_defined": ["sieben", "<name>"]},
    )  # fmt: skip
    scores = [event["cross-entropy"] for event in events(fine, "validation")]
    assert scores[-1] < scores[0]


def test_another_size_of_the_vocabulary_is_refused(make: Make, tmp_path: Path) -> None:
    source = trained(make, tmp_path)
    with pytest.raises(UserError, match=r"corpus.vocabulary.size: is 77, but the vocabulary of .* has \d+ pieces; remove"):
        trained(make, tmp_path, "fine", init=str(source), corpus__vocabulary__size=77)


def test_a_new_rank_0_begins_with_it_too_if_there_is_no_checkpoint_yet(make: Make, tmp_path: Path) -> None:
    source = trained(make, tmp_path)
    config = dataclasses.replace(make(init=str(source)), run=str(tmp_path / "fine"))
    with opened(config, False, False) as first:
        vocabulary, stores, initial = first.vocabulary, first.stores, first.initial
    with taken_over(config, vocabulary, stores, auto=None, overwrite=False, begun=False) as second:
        assert initial is not None
        assert second.initial == initial
    source.rename(tmp_path / "elsewhere")
    with taken_over(config, vocabulary, stores, auto=None, overwrite=False, begun=True) as third:
        assert third.initial is None, "the survivors have the state; the model is not needed"


def test_a_new_rank_0_starts_over_too_if_training_had_not_begun(make: Make, tmp_path: Path) -> None:
    trained(make, tmp_path, "old")
    config = dataclasses.replace(make(), run=str(tmp_path / "old"))
    with opened(config, False, True) as first:
        vocabulary, stores = first.vocabulary, first.stores
    with taken_over(config, vocabulary, stores, auto=None, overwrite=True, begun=False) as second:
        assert (second.saved, second.overwrite) == (None, True)
    with taken_over(config, vocabulary, stores, auto=None, overwrite=True, begun=True) as third:
        assert not third.overwrite, "what has been trained since is kept"


def test_a_new_rank_0_with_the_state_of_survivors_needs_no_intact_checkpoint(make: Make, tmp_path: Path) -> None:
    source = trained(make, tmp_path, "old")
    config = dataclasses.replace(make(), run=str(source))
    with opened(config, False, False) as first:
        vocabulary, stores = first.vocabulary, first.stores
    for file in source.glob("checkpoints/*/parameters.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    with (
        pytest.raises(UserError, match="no checkpoint of the run is intact"),
        taken_over(config, vocabulary, stores, auto=None, overwrite=False, begun=False),
    ):
        pass
    with taken_over(config, vocabulary, stores, auto=None, overwrite=False, begun=True) as taken:
        assert taken.saved is None


def test_a_restart_that_does_not_find_its_run_is_refused_until_the_machine_that_has_it_is_back(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(make(), run=str(tmp_path / "run"))
    monkeypatch.setenv("NMT_TRAIN_RESTARTED", "not-begun")
    with opened(config, False, False) as prepared:
        assert prepared.saved is None
    monkeypatch.setenv("NMT_TRAIN_RESTARTED", "begun")
    with (
        pytest.raises(UserError, match=r"run: .* is empty, although the run had begun") as refused,
        opened(config, False, False),
    ):
        pass
    assert refused.value.status == TRY_AGAIN
    (tmp_path / "run" / "config.yml").touch()
    with opened(config, False, False) as prepared:
        assert prepared.saved is None


@pytest.mark.slow
def test_a_run_that_has_begun_otherwise_does_not_change_its_beginning(make: Make, tmp_path: Path) -> None:
    source = trained(make, tmp_path)
    begun = trained(make, tmp_path, "begun")
    trained(make, tmp_path, "begun", init=str(source), stop__after="20u")
    assert f"init: {source} is ignored: the run has already begun" in (begun / "train.log").read_text(encoding="utf-8")
    assert manifest(begun / "last")["history"] == []
    fine = trained(make, tmp_path, "fine", init=str(source))
    trained(make, tmp_path, "fine", init=str(begun), stop__after="20u")
    assert f"init: {begun} is ignored" in (fine / "train.log").read_text(encoding="utf-8")
