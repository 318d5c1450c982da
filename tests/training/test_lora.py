"""Fine-tuning of low-rank factors: all else stays as it is, workers exchange little, and the result is an ordinary model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import ctranslate2
import pytest
import torch
from conftest import Make
from models import random_batch, random_model
from simulated import LINK, events, parameters, run
from torch import Tensor

from nmt_train import cli
from nmt_train.cli import export
from nmt_train.common.errors import UserError
from nmt_train.corpus.vocabulary import PAD
from nmt_train.load_model import load_model
from nmt_train.model.lora import is_factor, merged
from nmt_train.model.metrics import ValidationConfig
from nmt_train.model.transformer import Transformer
from nmt_train.optim.flat_model import FlatModel
from nmt_train.report.table import measure
from nmt_train.run import checkpoint
from nmt_train.simulation.cluster import Kill
from nmt_train.training.start import start

CPU = torch.device("cpu")
PIECES = 50


@pytest.fixture
def source(make: Make, tmp_path: Path) -> Path:
    return trained(make, tmp_path, "source", stop__after="60u")


def trained(make: Make, tmp_path: Path, name: str, **changes: Any) -> Path:
    assert start(dataclasses.replace(make(**changes), run=str(tmp_path / name)), False, False) == 0
    return tmp_path / name


def logits(model: Transformer, pieces: int = PIECES) -> Tensor:
    batch = random_batch(pieces)
    with torch.inference_mode():
        states = model.states(batch.source, batch.source_mask, batch.target_in)
        return torch.nn.functional.linear(states, model.output_matrix, model.output_bias)[batch.target_out != PAD]


def parts(model: Transformer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The factors, and the other parameters."""
    state = model.state_dict()
    factors, frozen = ({name: its for name, its in state.items() if is_factor(name) is wanted} for wanted in (True, False))
    return factors, frozen


def test_only_factors_of_attention_are_trained() -> None:
    flat = FlatModel(random_model(PIECES, lora_rank=3))
    flat.backward(flat.loss(random_batch(PIECES)))
    assert [name for name, _ in flat.layout][:2] == [f"encoder.0.attention.query_key_value.{its}" for its in ("down", "up")]
    assert {name.rsplit(".", 1)[1] for name, _ in flat.layout} == {"down", "up"}
    projections = 2 * 4 + 3 * 8  # 2 encoder layers, and 3 decoder layers with attention to the source, too
    assert flat.parameters.numel() == projections * 2 * 3 * 32, "two factors of rank 3 for each projection of width 32"
    assert bool(flat.gradient.ne(0).all())
    assert all(parameter.grad is None for parameter in flat.model.parameters() if not parameter.requires_grad)


def test_merged_it_is_an_ordinary_model_with_the_same_logits() -> None:
    adapted = random_model(PIECES, lora_rank=3)
    factors, frozen = parts(adapted)
    plain = random_model(PIECES)
    plain.load_state_dict(merged(factors, frozen))
    torch.testing.assert_close(logits(plain), logits(adapted), rtol=0, atol=1e-4)
    assert float((logits(plain) - logits(random_model(PIECES))).abs().max()) > 0.1
    state = adapted.start(random_batch(PIECES).source[:1], None)
    step = adapted.step(torch.full((1, 1), 2), state)
    other = plain.start(random_batch(PIECES).source[:1], None)
    torch.testing.assert_close(step, plain.step(torch.full((1, 1), 2), other), rtol=0, atol=1e-4)


def test_gradients_of_factors_are_those_of_the_merged_matrices() -> None:
    """With W' = W + 2 up down, dL/d up = 2 dL/dW' down^T, and dL/d down = 2 up^T dL/dW'."""
    adapted, plain = random_model(PIECES, lora_rank=3), random_model(PIECES)
    plain.load_state_dict(merged(*parts(adapted)))
    for model in (adapted, plain):
        model.loss(random_batch(PIECES)).backward()
    for name in ("encoder.1.attention.output", "decoder.2.cross.query"):
        layer, gradient = adapted.get_submodule(name), plain.get_submodule(name).weight.grad
        torch.testing.assert_close(layer.up.grad, 2 * gradient @ layer.down.detach().T, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(layer.down.grad, 2 * layer.up.detach().T @ gradient, rtol=1e-3, atol=1e-6)


def test_in_bf16_it_computes_about_the_same() -> None:
    exact, rounded = (FlatModel(random_model(PIECES, lora_rank=3), precision) for precision in ("fp32", "bf16"))
    for flat in (exact, rounded):
        flat.backward(flat.loss(random_batch(PIECES)))
    assert rounded.gradient.dtype == rounded.frozen.vector.dtype == torch.float32
    assert float((rounded.gradient - exact.gradient).norm() / exact.gradient.norm()) < 0.1
    rounded.frozen.load({name: torch.zeros_like(its) for name, its in rounded.frozen.named().items()}, "here")
    assert not any(bool(its.any()) for its in rounded.model.parameters() if not its.requires_grad), "the copies follow"


def test_it_begins_as_its_source_learns_and_leaves_all_else_as_it_was(make: Make, source: Path, tmp_path: Path) -> None:
    fine = trained(
        make, tmp_path, "fine", init=str(source), model__lora_rank=4, stop__after="60u", validation__every="30u",
        optimizer__learning_rate=0.02, checkpoint__keep=9, seed=2,
    )  # fmt: skip
    scores = [event["cross-entropy"] for event in events(fine, "validation")]
    assert scores[-1] < scores[0]
    before, saved = checkpoint.load((source / "last").resolve()), checkpoint.load((fine / "last").resolve())
    theirs, frozen = before.tensors("parameters"), saved.tensors("frozen")
    assert {*frozen} == {*theirs}
    assert all(torch.equal(frozen[name], theirs[name]) for name in theirs)
    assert all(map(is_factor, saved.tensors("parameters")))
    first, _, _ = load_model([fine / "checkpoints" / "0"], CPU)
    assert all(torch.equal(its, theirs[name]) for name, its in first.named_parameters()), "the factors begin at zero"
    (row,) = measure([fine / "best-cross-entropy"], None, None, ValidationConfig(metrics=["cross-entropy"]), CPU)
    assert float(row["cross-entropy"]) == pytest.approx(min(scores))
    assert "trained and " in (fine / "train.log").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"optimizer__smoothing": 0.1}, {"optimizer__name": "muon"}])
def test_resuming_is_exact(make: Make, source: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    more = {"init": str(source), "model__lora_rank": 2, **changes}
    whole = trained(make, tmp_path, "whole", stop__after="20u", **more)
    halves = trained(make, tmp_path, "halves", stop__after="10u", **more)
    source.rename(tmp_path / "elsewhere")
    trained(make, tmp_path, "halves", stop__after="20u", **more)
    assert parameters(halves) == parameters(whole)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "low-bit", "powersgd", "sparse-overlap", "sparse-local", "strom", "easgd"])
def test_several_workers_train_factors(make: Make, source: Path, tmp_path: Path, mode: str) -> None:
    more = {"init": str(source), "mode": mode, "stop__after": "40u", "validation__every": "20u"}
    fine = run(make, tmp_path / "fine", [1, 1], model__lora_rank=2, optimizer__learning_rate=0.02, **more)
    scores = [event["cross-entropy"] for event in events(fine, "validation")]
    assert scores[-1] < scores[0]
    frozen, theirs = (checkpoint.load((path / "last").resolve()) for path in (fine, source))
    assert all(torch.equal(its, theirs.tensors("parameters")[name]) for name, its in frozen.tensors("frozen").items())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "sparse-overlap", "strom"])
@pytest.mark.parametrize("ended", [0, 1])
def test_the_others_continue_with_the_same_frozen_parameters_if_a_rank_ends(
    make: Make, source: Path, tmp_path: Path, mode: str, ended: int
) -> None:
    fine = run(
        make, tmp_path / "fine", [1, 1, 1], init=str(source), mode=mode, model__lora_rank=2, stop__after="60u",
        places={**LINK, "kills": [Kill(ended, "1.5s")]},
    )  # fmt: skip
    assert len(events(fine, "recovery")) == 1
    frozen, theirs = (checkpoint.load((path / "last").resolve()) for path in (fine, source))
    assert all(torch.equal(its, theirs.tensors("parameters")[name]) for name, its in frozen.tensors("frozen").items())


@pytest.mark.slow
def test_what_is_exported_is_merged(make: Make, source: Path, tmp_path: Path) -> None:
    fine = trained(
        make, tmp_path, "fine", init=str(source), model__lora_rank=4, optimizer__learning_rate=0.05, stop__after="30u"
    )
    assert cli.run(export.command, [str(fine), str(tmp_path / "out"), "--to", "ctranslate2"]) == 0
    model, vocabulary, _ = load_model([(fine / "last").resolve()], CPU)
    batch = random_batch(len(vocabulary))
    source_pieces, target = (
        [[vocabulary.piece(i) for i in row if i > 3] for row in ids.tolist()] for ids in (batch.source, batch.target_out)
    )
    found = ctranslate2.Translator(str(tmp_path / "out")).score_batch(source_pieces, target)
    with torch.inference_mode():
        assert [sum(its.log_probs) for its in found] == pytest.approx(model.log_probabilities(batch).tolist(), abs=1e-2)
    again = trained(make, tmp_path, "again", init=str(fine), validation__every="3u")
    begun = load_model([again / "checkpoints" / "0"], CPU)[0].state_dict()
    assert all(torch.equal(begun[name], its) for name, its in model.state_dict().items())
    assert not checkpoint.load((again / "last").resolve()).has("frozen"), "from there on, all parameters are trained"


def test_it_needs_a_model_to_adapt_and_keeps_its_rank(make: Make, source: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="model.lora_rank trains only factors beside the parameters of a model; name that"):
        make(model__lora_rank=4)
    trained(make, tmp_path, "fine", init=str(source), model__lora_rank=4)
    with pytest.raises(UserError, match="cannot change what it began with.*model.lora_rank was 4, now 8"):
        trained(make, tmp_path, "fine", init=str(source), model__lora_rank=8, stop__after="9u")


def test_factors_that_do_not_fit_are_damage(make: Make, source: Path, tmp_path: Path) -> None:
    saved = checkpoint.load((source / "last").resolve())
    tensors = saved.tensors("parameters")
    for factors in (
        {"encoder.0.attention.output.up": torch.zeros(16, 2)},
        {"x.up": torch.zeros(4, 0), "x.down": torch.zeros(2, 2)},
    ):
        path = tmp_path / f"damaged-{len(factors)}"
        facts = {name: value for name, value in saved.facts.items() if name not in ("format", "vocabulary", "files")}
        checkpoint.save(path, {"parameters": factors, "frozen": tensors}, facts, saved.vocabulary())
        with pytest.raises(UserError, match="low-rank factors do not fit"):
            load_model([path], CPU)


@pytest.mark.slow
def test_workers_exchange_only_the_factors(make: Make, source: Path, tmp_path: Path) -> None:
    sent = []
    for rank in (None, 2):
        fine = run(
            make, tmp_path / f"{rank}", [1, 1], init=str(source), mode="sync", model__lora_rank=rank, stop__after="40u",
            log__every="40u",
        )  # fmt: skip
        tags = events(fine, "ranks")[-1]["ranks"][1]["sent"]
        sent.append(sum(size for tag, (_, size) in tags.items() if tag != "state"))
    assert sent[1] < 0.2 * sent[0], "a tenth of the parameters"
