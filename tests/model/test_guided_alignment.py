"""Guided alignment: one attention head learns word alignments, and nothing else changes."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Make, small
from models import random_batch, random_model
from simulated import run
from torch import Tensor

from nmt_train import config as configuration
from nmt_train import device
from nmt_train.config import Config
from nmt_train.corpus.batch import Batch
from nmt_train.corpus.batches import Batches
from nmt_train.corpus.data_shard import DataShard, Position
from nmt_train.corpus.store import open_stores
from nmt_train.corpus.vocabulary import PAD
from nmt_train.load_model import load_model
from nmt_train.model import attention
from nmt_train.modes.table import MODES
from nmt_train.optim.flat_model import FlatModel

LAYER = 2


def guided(**changes: Any) -> dict[str, Any]:
    return {"guided_alignment": {"layer": LAYER, **changes}}


def linked(batch: Batch, seed: int = 1) -> Batch:
    """The batch with links of every second target piece, END left out, to one or two random source pieces."""
    random, places, shares = torch.Generator().manual_seed(seed), [], []
    for row, (source, target) in enumerate(zip(batch.source, batch.target_out, strict=True)):
        for at in range(0, int((target != PAD).sum()) - 1, 2):
            of = torch.randperm(int((source != PAD).sum()) - 1, generator=random)[: 1 + at % 4 // 2].tolist()
            places += [(row * batch.target_out.shape[1] + at) * batch.source.shape[1] + place for place in of]
            shares += [1 / len(of)] * len(of)
    return dataclasses.replace(batch, links=torch.tensor(places), link_shares=torch.tensor(shares))


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_attention_is_that_of_the_first_head_of_the_layer(monkeypatch: pytest.MonkeyPatch, norm: str) -> None:
    model, batch, seen = random_model(50, norm, **guided()), random_batch(50), list[Tensor]()
    original = attention.attend

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: Any) -> Tensor:
        if query.shape[2] != key.shape[2]:  # attention to the source
            scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
            seen.append(torch.softmax(scores if mask is None else scores + mask, -1)[:, 0])
        return original(query, key, value, mask, *rest)

    monkeypatch.setattr(attention, "attend", attend)
    with torch.inference_mode():
        found = model.guided_attention(batch)
    assert len(seen) == model.config.decoder_layers
    torch.testing.assert_close(found, seen[LAYER - 1])
    assert not any(torch.allclose(found, other) for number, other in enumerate(seen) if number != LAYER - 1)
    assert not found[(batch.source == PAD)[:, None].expand_as(found)].any()


def test_the_loss_is_the_translations_plus_the_weighted_cross_entropy_per_target_piece() -> None:
    model, batch = random_model(50, **guided(weight=0.3)), linked(random_batch(50))
    assert batch.links is not None
    assert batch.link_shares is not None
    probabilities = model.guided_attention(batch).flatten()[batch.links]
    cost = -(batch.link_shares * probabilities.log()).sum() / batch.target_tokens
    plain = model.loss(dataclasses.replace(batch, links=None, link_shares=None))
    assert model.loss(batch).item() == pytest.approx((plain + 0.3 * cost).item(), rel=1e-5)
    assert cost > 0.1


@pytest.mark.parametrize("setting", [{}, guided(weight=0)], ids=["no guided head", "weight 0"])
def test_without_guidance_every_bit_is_as_before(setting: dict[str, Any]) -> None:
    plain, other = random_model(50), random_model(50, **setting)
    batch = random_batch(50)
    losses = [plain.loss(batch), other.loss(batch if not setting else linked(batch))]
    for loss in losses:
        loss.backward()
    assert torch.equal(losses[0], losses[1])
    for one, two in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)  # type: ignore[arg-type]


def test_guidance_reaches_only_the_layers_up_to_the_head_and_of_its_layer_only_the_head() -> None:
    model, batch = random_model(50, **guided(weight=1.0)), linked(random_batch(50))
    loss = model.loss(batch) - model.loss(dataclasses.replace(batch, links=None, link_shares=None))
    loss.backward()
    moved = {name for name, its in model.named_parameters() if its.grad is not None and its.grad.abs().max() > 1e-5}
    assert {name.split(".")[1] for name in moved if name.startswith("decoder.")} == {"0", "1"}
    query = model.decoder[LAYER - 1].cross.query.weight.grad
    assert query is not None
    size = model.config.dim // model.config.heads
    assert query[:size].abs().max() > 1e-4
    assert query[size:].abs().max() < 1e-5


def test_one_batch_is_the_weighted_mean_of_its_parts() -> None:
    """So accumulation, and several workers, give the gradient of the joined batch."""
    model, parts = random_model(50, **guided(weight=1.0)), [linked(random_batch(50, (6, 6, 6), seed)) for seed in (1, 2)]
    width, rows = parts[0].source.shape[1], parts[0].target_out.numel()
    joined = Batch(
        *(torch.cat([getattr(part, name) for part in parts]) if name else None
          for name in ("source", "", "target_in", "target_out", "")),
        sum(part.source_tokens for part in parts), sum(part.target_tokens for part in parts), (), None,
        torch.cat([parts[0].links, parts[1].links + rows * width]), torch.cat([part.link_shares for part in parts]),
    )  # type: ignore[arg-type] # fmt: skip
    mean = sum(model.loss(part) * part.target_tokens for part in parts) / joined.target_tokens
    torch.testing.assert_close(model.loss(joined), mean)


def test_bf16_is_near_fp32() -> None:
    losses, gradients = [], []
    for precision in ("fp32", "bf16"):
        flat = FlatModel(random_model(50, **guided(weight=5.0)), precision)
        flat.backward(loss := flat.loss(linked(random_batch(50))))
        losses.append(loss.item())
        gradients.append(flat.gradient)
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    assert float(torch.cosine_similarity(gradients[0], gradients[1], dim=0)) > 0.999


def after_training(make: Make, demo: Path, folder: Path, mode: str, weight: float, **changes: Any) -> float:
    """The mean attention to the first word, which all words are linked with."""
    alignments = folder / "alignments"
    lengths = [len(line.split()) for line in (demo / "train.de").read_text(encoding="utf-8").splitlines()]
    alignments.write_text("".join(" ".join(f"0-{word}" for word in range(n)) + "\n" for n in lengths), encoding="utf-8")
    train = [{"files": [f"{demo}/train.en", f"{demo}/train.de"], "alignments": str(alignments)}]
    guided = {"corpus__train": train, "model__guided_alignment": {"layer": 1, "weight": weight}}
    settings = {**guided, "mode": mode, "batch__tokens": 300, "stop__after": "3e", **changes}
    done = run(make, folder / "run", [2] if mode == "single" else [2, 1], **settings)
    model, vocabulary, _ = load_model([done / "last"], torch.device("cpu"))
    config = make(**settings)
    stores = open_stores(config.corpus, vocabulary, folder / "store")
    batch = next(Batches(stores, config.corpus, config.batch, vocabulary, 1).stream(DataShard(), Position())).batch
    with torch.inference_mode():
        return float(model.guided_attention(batch).flatten()[batch.links].mean())


@pytest.fixture(scope="module")
def without_guidance(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    folder = tmp_path_factory.mktemp("without")

    def make(**changes: Any) -> Config:
        values = small(demo, folder / "run")
        for name, value in changes.items():
            section, _, key = name.rpartition("__")
            (values.setdefault(section, {}) if section else values)[key] = value
        return configuration.validate(values, {})

    return after_training(make, demo, folder, "single", 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_the_head_learns_in_every_mode(make: Make, demo: Path, tmp_path: Path, mode: str, without_guidance: float) -> None:
    assert after_training(make, demo, tmp_path, mode, 2.0) > 1.3 * without_guidance


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"precision": "bf16"}, {"batch__accumulate": 2}], ids=str)
def test_it_learns_in_bf16_and_with_accumulation(
    make: Make, demo: Path, tmp_path: Path, without_guidance: float, changes: dict[str, Any]
) -> None:
    assert after_training(make, demo, tmp_path, "sync", 2.0, **changes) > 1.3 * without_guidance


@pytest.mark.slow
def test_a_compiled_layer_with_a_guided_head_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch traces it: one graph for encoder layers, one for decoder layers, one for that of the head."""
    graphs = []

    def trace(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=trace))
    monkeypatch.setattr(device.shutil, "which", lambda name: name)
    plain, traced = (random_model(50, dropout=0.0, **guided(weight=1.0)).train() for _ in range(2))
    traced.compile_layers(partial(device.compiled, own=torch.device("cpu")))
    for lengths in ((5, 3, 7), (4, 3), (6, 2, 2, 3)):
        batch = linked(random_batch(50, lengths))
        losses = [its.loss(batch) for its in (plain, traced)]
        torch.testing.assert_close(losses[1], losses[0])
        for loss in losses:
            loss.backward()
    assert len(graphs) == 3
    for ours, theirs in zip(traced.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
