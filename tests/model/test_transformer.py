"""The transformer against small references: attention written out, masks, dropout, step-wise decoding."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nmt_train import device
from nmt_train.common.errors import UserError
from nmt_train.corpus.batch import Batch, assemble
from nmt_train.corpus.vocabulary import BEGIN, END, LANGUAGE, PAD, UNKNOWN
from nmt_train.model import PRESETS, ModelConfig
from nmt_train.model.attention import Attention, attend, fused
from nmt_train.model.dropout import drop_words, dropout
from nmt_train.model.transformer import Transformer
from nmt_train.optim.flat_model import FlatModel

VOCABULARY = 30


def tiny(**changes: object) -> ModelConfig:
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "dim": 16, "ffn_dim": 24, "heads": 4, "dropout": 0.0}
    return ModelConfig(**{**sizes, **changes})  # type: ignore[arg-type]


def model(**changes: object) -> Transformer:
    torch.manual_seed(1)
    return Transformer(tiny(**changes), VOCABULARY)


def sentences(*lengths: int, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(4, VOCABULARY, size=length) for length in lengths]


def by_hand(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention element by element, in Python's own arithmetic."""
    result = torch.zeros_like(query)
    batch, heads, length, dim = query.shape
    for b in range(batch):
        for h in range(heads):
            for i in range(length):
                weights = []
                for j in range(key.shape[2]):
                    score = sum(float(query[b, h, i, d]) * float(key[b, h, j, d]) for d in range(dim)) / math.sqrt(dim)
                    weights.append(math.exp(score + float(mask[b, 0, i, j])))
                for j, weight in enumerate(weights):
                    result[b, h, i] += weight / sum(weights) * value[b, h, j]
    return result


def test_attention_is_what_the_paper_writes() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 2, length, 4) for length in (3, 5, 5))
    mask = torch.zeros(2, 1, 3, 5)
    mask[1, :, :, 3:] = -math.inf
    torch.testing.assert_close(attend(query, key, value, mask, 0.0), by_hand(query, key, value, mask))


@pytest.mark.parametrize("way", [attend, fused])
def test_a_causal_position_attends_to_itself_and_earlier_ones(way: Any) -> None:
    query, key, value = (torch.randn(2, 2, 4, 3) for _ in range(3))
    later = torch.full((4, 4), -math.inf).triu_(1)
    torch.testing.assert_close(way(query, key, value, None, 0.0, causal=True), attend(query, key, value, later, 0.0))


def test_self_attention_splits_its_fused_projection_into_queries_keys_and_values() -> None:
    torch.manual_seed(0)
    attention, x = Attention(8, 2, 0.0, cross=False), torch.randn(2, 3, 8)
    weight, bias = attention.query_key_value.weight, attention.query_key_value.bias
    query, key, value = (
        (x @ weight[8 * part : 8 * part + 8].T + bias[8 * part : 8 * part + 8]).view(2, 3, 2, 4).transpose(1, 2)
        for part in range(3)
    )
    expected = attention.output(by_hand(query, key, value, torch.zeros(2, 1, 3, 3)).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x, None, None), expected)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_padding_changes_nothing(norm: str) -> None:
    network = model(norm=norm).eval()
    source, target = sentences(3, 7), sentences(6, 2, seed=1)
    together = network.cross_entropy(assemble(source, target))
    apart = sum(network.cross_entropy(assemble([s], [t])) for s, t in zip(source, target, strict=True))
    torch.testing.assert_close(together, apart)


def test_a_position_sees_itself_and_those_before_but_none_after() -> None:
    network = model().eval()
    source = torch.randint(4, VOCABULARY, (1, 5))
    memory, target = network.encode(source, None), torch.randint(4, VOCABULARY, (1, 6))
    changed = target.clone()
    changed[0, 3] = 4 + (changed[0, 3] - 3) % (VOCABULARY - 4)
    before, after = network.decode(target, memory, None), network.decode(changed, memory, None)
    torch.testing.assert_close(before[:, :3], after[:, :3])
    assert not torch.allclose(before[:, 3:], after[:, 3:])


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("tied", ["all", "target-output", "none"])
@pytest.mark.parametrize("conventions", ["standard", "marian", "m2m100"])
def test_decoding_step_by_step_gives_the_same_logits_as_all_at_once(norm: str, tied: str, conventions: str) -> None:
    network = model(norm=norm, tied=tied, conventions=conventions).eval()
    batch = assemble(sentences(4, 6), sentences(5, 5, seed=2))
    hidden = network.states(batch.source, batch.source_mask, batch.target_in)
    expected = torch.nn.functional.linear(hidden, network.output_matrix, network.prediction_bias)
    state = network.start(batch.source, batch.source_mask)
    words = batch.target_in
    for position in range(words.shape[1]):
        logits = network.step(words[:, position : position + 1].expand(-1, 3).contiguous(), state)
        for beam in range(3):
            torch.testing.assert_close(logits[:, beam], expected[:, position], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tied", ["all", "none"])
def test_with_marians_conventions_the_decoder_starts_from_a_zero_vector(tied: str) -> None:
    network = model(conventions="marian", tied=tied)
    batch = assemble(sentences(4, 6), sentences(5, 2))
    before = network.states(batch.source, batch.source_mask, batch.target_in)
    with torch.no_grad():
        network.target_embedding[BEGIN] += 1
    torch.testing.assert_close(network.states(batch.source, batch.source_mask, batch.target_in), before)
    before.sum().backward()
    assert network.target_embedding.grad is not None
    assert not network.target_embedding.grad[BEGIN].any()
    assert not network.target_lookups[BEGIN].any()
    assert torch.equal(network.target_lookups[BEGIN + 1 :], network.target_embedding[BEGIN + 1 :])


@pytest.mark.parametrize("output_bias", [False, True])
def test_with_marians_conventions_padding_and_begin_have_no_probability(output_bias: bool) -> None:
    network = model(conventions="marian", output_bias=output_bias).eval()
    batch = assemble(sentences(4, 6), sentences(5, 5))
    state = network.start(batch.source, batch.source_mask)
    probabilities = network.step(batch.target_in[:, :1], state).softmax(-1)
    assert not probabilities[..., [PAD, BEGIN]].any()
    assert bool((probabilities[..., [UNKNOWN, END]] > 0).all())
    hidden = network.states(batch.source, batch.source_mask, batch.target_in)
    logits = torch.nn.functional.linear(hidden, network.output_matrix, network.output_bias)
    logits[..., [PAD, BEGIN]] = -math.inf
    expected = logits.log_softmax(-1).gather(-1, batch.target_out[..., None]).sum()
    torch.testing.assert_close(network.log_probabilities(batch).sum(), expected)
    torch.testing.assert_close(network.cross_entropy(batch), -expected)


def test_the_sinusoids_of_marian_go_from_one_radian_per_word_to_exactly_a_ten_thousandth() -> None:
    """tensor2tensor and fairseq have them too; those of the paper stop one step before."""
    table = model(conventions="marian", dim=8).position_table(50, torch.device("cpu"))
    rates = torch.tensor([1.0, 10000 ** (-1 / 3), 10000 ** (-2 / 3), 1e-4])
    angles = torch.arange(50)[:, None] * rates
    torch.testing.assert_close(table, torch.cat([angles.sin(), angles.cos()], dim=1))
    with pytest.raises(ValueError, match="dim 2 is too small for the sinusoids of Marian"):
        tiny(conventions="marian", dim=2, heads=1)


def test_with_m2m100s_conventions_pieces_of_languages_come_before_source_and_target() -> None:
    network = model(conventions="m2m100").eval()
    source, target = sentences(4, 6), sentences(5, 2)
    batch = assemble(source, target)
    plain = model(conventions="marian").eval()  # the same sinusoids, but for the first two
    table = network.position_table(50, torch.device("cpu"))
    torch.testing.assert_close(table[:48], plain.position_table(50, torch.device("cpu"))[2:])
    found = network.states(batch.source, batch.source_mask, batch.target_in)
    for row, (left, right) in enumerate(zip(source, target, strict=True)):
        memory = network.encode(torch.tensor([[LANGUAGE, *left, END]]), None)
        states = network.decode(torch.tensor([[END, BEGIN, *right]]), memory, None)
        torch.testing.assert_close(found[row, : len(right) + 1], states[0, 1:])


def test_attention_of_a_guided_head_is_without_the_pieces_of_languages() -> None:
    network = model(conventions="m2m100", guided_alignment={"layer": 1}).eval()
    batch = assemble(sentences(4, 6), sentences(5, 2))
    weights = network.guided_attention(batch)
    assert weights.shape == (*batch.target_in.shape, batch.source.shape[1])
    assert bool((weights[batch.target_out != PAD].sum(-1) < 1).all()), "some attention goes to the language"


@pytest.mark.parametrize(("tied", "matrices"), [("all", 1), ("target-output", 2), ("none", 3)])
def test_tied_embeddings_are_one_matrix(tied: str, matrices: int) -> None:
    network = model(tied=tied)
    assert sum(parameter.shape == (VOCABULARY, 16) for parameter in network.parameters()) == matrices


def parameters(config: ModelConfig, vocabulary: int) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Transformer(config, vocabulary).parameters())


def test_presets_have_the_sizes_of_the_paper() -> None:
    assert {name: (sizes["dim"], sizes["ffn_dim"], sizes["heads"]) for name, sizes in PRESETS.items()} == {
        "tiny": (128, 256, 4), "small": (256, 1024, 4), "base": (512, 2048, 8), "big": (1024, 4096, 16),
    }  # fmt: skip
    # Vaswani et al. 2017, table 3: 65 and 213 million with 37,000 shared pieces.
    assert round(parameters(ModelConfig(preset="base"), 37_000) / 1e6) in range(62, 66)
    assert round(parameters(ModelConfig(preset="big"), 37_000) / 1e6) in range(210, 216)


def test_dropout_keeps_the_expectation_the_rate_and_the_gradient_of_what_is_kept() -> None:
    torch.manual_seed(0)
    x = torch.ones(2000, 100, requires_grad=True)
    y = dropout(x, 0.3, training=True)
    dropped = float((y == 0).float().mean())
    assert abs(dropped - 77 / 256) < 0.005
    torch.testing.assert_close(y.detach()[y > 0], torch.full((int((y > 0).sum()),), 256 / (256 - 77)))
    assert abs(float(y.mean()) - 1) < 0.01
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())
    columns = (y == 0).float().mean(0)
    assert float(columns.max() - columns.min()) < 0.1, "every column alike: all bits of the random words are used"
    assert torch.equal(dropout(x, 0.3, training=False), x)


@pytest.mark.parametrize("probability", [0.001, 0.5, 0.997, 0.999])
def test_dropout_keeps_the_expectation_at_any_probability(probability: float) -> None:
    torch.manual_seed(0)
    y = dropout(torch.ones(1 << 20), probability, training=True)
    assert abs(float(y.mean()) - 1) < 0.1


def test_dropped_words_are_dropped_whole() -> None:
    torch.manual_seed(0)
    kept = drop_words(torch.ones(500, 4), 0.2, training=True).sum(1)
    assert set(kept.tolist()) == {0.0, 4.0}
    assert 0.1 < float((kept == 0).float().mean()) < 0.3


@pytest.mark.slow
def test_training_overfits_a_batch_to_near_zero_loss() -> None:
    network = model(label_smoothing=0.0)
    batch = assemble(sentences(4, 6, 5, 7), sentences(5, 5, 4, 6, seed=2))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    for _ in range(150):
        optimizer.zero_grad()
        loss = network.loss(batch)
        loss.backward()
        optimizer.step()
    assert float(loss) < 0.01


def test_bfloat16_loss_and_gradient_are_near_those_of_fp32() -> None:
    batch: Batch = assemble(sentences(8, 9, 10), sentences(9, 8, 9, seed=2))
    gradients, losses = [], []
    for precision in ("fp32", "bf16"):
        flat = FlatModel(model(), precision)
        flat.backward(loss := flat.loss(batch))
        losses.append(float(loss))
        gradients.append(flat.gradient)
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    assert float(torch.cosine_similarity(gradients[0], gradients[1], dim=0)) > 0.999


@pytest.mark.slow
def test_one_compiled_layer_of_each_kind_serves_all_layers_and_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch traces it; what it then makes of that takes minutes, and is measured by scripts/check_gpu."""
    graphs = []

    def trace(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=trace))
    monkeypatch.setattr(device.shutil, "which", lambda name: name)
    plain, traced = model(encoder_layers=3, decoder_layers=2), model(encoder_layers=3, decoder_layers=2)
    lookups = [torch.zeros_like(its.target_embedding.data) for its in (plain, traced)]
    for its, gradient in zip((plain, traced), lookups, strict=True):
        its.separate_lookups(gradient)
    traced.compile_layers(partial(device.compiled, own=torch.device("cpu")))
    for lengths in ([5, 3, 7], [4, 3], [6, 2, 2, 3], [9, 8, 1, 1, 5]):
        batch = assemble(sentences(*lengths), sentences(*lengths, seed=1))
        losses = [its.loss(batch) for its in (plain, traced)]
        torch.testing.assert_close(losses[1], losses[0])
        for loss in losses:
            loss.backward()
    assert len(graphs) == 2
    assert [name for name, _ in traced.named_parameters()] == [name for name, _ in plain.named_parameters()]
    for ours, theirs in zip(traced.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close(lookups[1], lookups[0])
    assert lookups[0].any()


def test_compiling_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"compile: it needs a C or C\+\+ compiler, but host \S+ has none"):
        device.compiled(torch.relu, torch.device("cpu"))
