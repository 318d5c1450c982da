"""Beam search against exhaustive search, against itself on one sentence, and against a plain beam search."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from nmt_train.corpus.batch import pad, padding_mask
from nmt_train.corpus.vocabulary import BEGIN, END
from nmt_train.model import ModelConfig
from nmt_train.model.beam_search import Hypothesis, SearchConfig, search
from nmt_train.model.transformer import Transformer

VOCABULARY = 7
WORDS = [4, 5, 6]


@pytest.fixture(scope="module")
def model() -> Transformer:
    """A random model with sharp opinions."""
    torch.manual_seed(5)
    config = ModelConfig(encoder_layers=1, decoder_layers=1, dim=16, ffn_dim=16, heads=2, dropout=0.0)
    network = Transformer(config, VOCABULARY)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(2.0)
    return network.eval()


def sources(*lengths: int) -> torch.Tensor:
    random = np.random.default_rng(3)
    return pad([np.append(random.choice(WORDS, size=length), END) for length in lengths])


def log_probability(model: Transformer, source: torch.Tensor, words: tuple[int, ...]) -> float:
    """Of the translation `words` and its END, from one pass of the decoder over all of it."""
    target = torch.tensor([[BEGIN, *words]])
    logits = model.decode(target, model.encode(source, None), None) @ model.output_matrix.T
    logs = torch.log_softmax(logits[0], dim=1)
    return sum(float(logs[position, word]) for position, word in enumerate((*words, END)))


@torch.inference_mode()
@pytest.mark.parametrize("normalization", [0.0, 0.6, 1.0])
def test_a_beam_that_holds_everything_finds_what_exhaustive_search_finds(model: Transformer, normalization: float) -> None:
    longest = 4
    config = SearchConfig(beam=130, normalization=normalization, length_factor=0.0, length_extra=longest)
    for length in (1, 2, 3):
        source = sources(length)
        everything = {
            words: log_probability(model, source, words) for n in range(longest) for words in itertools.product(WORDS, repeat=n)
        }
        ranked = sorted(everything, key=lambda words: -everything[words] / (len(words) + 1) ** normalization)
        found = search(model, source, None, config)[0]
        assert len(found) == len(everything) == 40
        assert [tuple(hypothesis.ids) for hypothesis in found[:10]] == ranked[:10]
        for hypothesis in found:
            assert hypothesis.log_probability == pytest.approx(everything[tuple(hypothesis.ids)], abs=1e-4)
            assert hypothesis.score == pytest.approx(hypothesis.log_probability / (len(hypothesis.ids) + 1) ** normalization)


@torch.inference_mode()
def plain_beam_search(model: Transformer, source: torch.Tensor, config: SearchConfig) -> list[Hypothesis]:
    """One sentence, lists of Python numbers, and the whole decoder again at each step."""
    limit = config.limit(source.shape[1])
    alive: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[Hypothesis] = []
    memory = model.encode(source, None)
    while alive and len(finished) < config.beam:
        candidates = []
        for total, words in alive:
            hidden = model.decode(torch.tensor([[BEGIN, *words]]), memory, None)
            logs = torch.log_softmax(hidden[0, -1] @ model.output_matrix.T, dim=0)
            allowed = [END] if len(words) + 1 >= limit else [END, *WORDS]
            candidates += [(total + float(logs[word]), [*words, word]) for word in allowed]
        candidates.sort(key=lambda candidate: -candidate[0])
        for total, words in candidates[: config.beam]:
            if words[-1] == END and len(finished) < config.beam:
                finished.append(Hypothesis(words[:-1], total, total / len(words) ** config.normalization))
        alive = [(total, words) for total, words in candidates if words[-1] != END][: config.beam]
    return sorted(finished, key=lambda hypothesis: -hypothesis.score)


@pytest.mark.parametrize("beam", [1, 2, 3, 5])
def test_batched_search_gives_each_sentence_what_a_plain_search_of_it_alone_gives(model: Transformer, beam: int) -> None:
    config = SearchConfig(beam=beam, normalization=0.8, length_factor=1.5, length_extra=3)
    lengths = (9, 1, 4, 4, 7, 2)
    source = sources(*lengths)
    together = search(model, source, padding_mask(source), config)
    for row, length, found in zip(source, lengths, together, strict=True):
        expected = plain_beam_search(model, row[None, : length + 1], config)
        assert [hypothesis.ids for hypothesis in found] == [hypothesis.ids for hypothesis in expected]
        for left, right in zip(found, expected, strict=True):
            assert left.log_probability == pytest.approx(right.log_probability, abs=1e-3)


def test_no_translation_is_longer_than_its_own_limit(model: Transformer) -> None:
    config = SearchConfig(beam=2, length_factor=1.0, length_extra=1)
    with torch.no_grad():
        stubborn = Transformer(model.config, VOCABULARY)
        stubborn.load_state_dict(model.state_dict())
        stubborn.target_embedding[END] = 0.0
        stubborn.target_embedding[END] -= 3 * stubborn.target_embedding[4:].sum(0)
    source = sources(6, 2)
    found = search(stubborn.eval(), source, padding_mask(source), config)
    for length, hypotheses in zip((6, 2), found, strict=True):
        assert hypotheses
        assert all(len(hypothesis.ids) + 1 <= config.limit(length + 1) for hypothesis in hypotheses)
        assert all(math.isfinite(hypothesis.score) for hypothesis in hypotheses)
