"""Beam search against exhaustive search, against itself on one sentence, and against a plain beam search."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from enumerable import VOCABULARY, WORDS, Table
from hypothesis import given, settings
from hypothesis import strategies as st

from nmt_train.corpus.batch import pad, padding_mask
from nmt_train.corpus.vocabulary import BEGIN, END
from nmt_train.model import ModelConfig
from nmt_train.model.beam_search import Hypothesis, SearchConfig, _add, search
from nmt_train.model.transformer import Transformer


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
    return pad([random.choice(WORDS, size=length) for length in lengths])


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
    config = SearchConfig(130, normalization, length_factor=0.0, length_extra=longest, n_best=130)
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
    """One sentence, lists of Python numbers, the whole decoder again at each step, and no end before the maximum length."""
    limit = config.limit(source.shape[1])
    alive: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[Hypothesis] = []
    memory = model.encode(source, None)
    for _ in range(limit):
        candidates = []
        for total, words in alive:
            hidden = model.decode(torch.tensor([[BEGIN, *words]]), memory, None)
            logs = torch.log_softmax(hidden[0, -1] @ model.output_matrix.T, dim=0)
            candidates += [(total + float(logs[word]), [*words, word]) for word in (END, *WORDS)]
        candidates.sort(key=lambda candidate: -candidate[0])
        for total, words in candidates[: config.beam]:
            if words[-1] == END:
                finished.append(Hypothesis(words[:-1], total, total / len(words) ** config.normalization))
        alive = [candidate for candidate in candidates if candidate[1][-1] != END][: config.beam]
        if config.beam == 1 and finished:
            return finished
    greedy = plain_beam_search(model, source, replace(config, beam=1)) if config.beam > 1 else []
    found = finished + [hypothesis for hypothesis in greedy if hypothesis.ids not in [other.ids for other in finished]]
    return sorted(found, key=lambda hypothesis: -hypothesis.score)[: config.n_best]


@pytest.mark.parametrize("n_best", [1, 3])
@pytest.mark.parametrize("beam", [1, 2, 3, 5])
def test_batched_search_gives_each_sentence_what_a_plain_search_of_it_alone_gives(
    model: Transformer, beam: int, n_best: int
) -> None:
    config = SearchConfig(beam, normalization=0.8, length_factor=1.5, length_extra=3, n_best=min(n_best, beam))
    lengths = (9, 1, 4, 4, 7, 2)
    source = sources(*lengths)
    together = search(model, source, padding_mask(source), config)
    for row, length, found in zip(source, lengths, together, strict=True):
        expected = plain_beam_search(model, row[None, : length + 1], config)
        if not expected:
            assert [hypothesis.ended for hypothesis in found] == [False] * config.n_best
            continue
        assert [hypothesis.ids for hypothesis in found] == [hypothesis.ids for hypothesis in expected]
        for left, right in zip(found, expected, strict=True):
            assert left.ended
            assert left.log_probability == pytest.approx(right.log_probability, abs=1e-3)


def best(model: Table, beam: int, normalization: float, longest: int, n_best: int = 1) -> list[Hypothesis]:
    config = SearchConfig(beam, normalization, length_factor=0.0, length_extra=longest, n_best=n_best)
    return search(model, torch.tensor([[4, END]]), None, config)[0]  # type: ignore[arg-type]


CASES = given(seed=st.integers(0, 10**6), beam=st.integers(2, 8), normalization=st.sampled_from([0.0, 0.6, 1.0, 2.0]))


@pytest.mark.slow
@settings(max_examples=150)
@CASES
def test_a_beam_is_never_worse_than_greedy_search(seed: int, beam: int, normalization: float) -> None:
    model = Table(seed)
    wide, greedy = (best(model, size, normalization, longest=6)[0] for size in (beam, 1))
    assert wide.ended >= greedy.ended
    assert wide.score >= greedy.score or not greedy.ended


@pytest.mark.slow
@settings(max_examples=50)
@CASES
def test_a_beam_as_large_as_the_space_finds_the_optimum(seed: int, beam: int, normalization: float) -> None:
    model, longest = Table(seed), 4
    everything = [words for n in range(longest) for words in itertools.product(WORDS, repeat=n)]
    scores = {words: model.log_probability(words) / (len(words) + 1) ** normalization for words in everything}
    found = best(model, 130, normalization, longest, n_best=beam)
    assert [hypothesis.score for hypothesis in found] == pytest.approx(sorted(scores.values(), reverse=True)[:beam], abs=1e-4)


@pytest.mark.slow
@settings(max_examples=100)
@CASES
def test_the_search_ends_no_sooner_than_its_result_is_certain(seed: int, beam: int, normalization: float) -> None:
    model = Table(seed)
    short, whole = (best(model, beam, normalization, longest=7, n_best=count) for count in (2, 10**6))
    assert short == whole[:2]


@settings(max_examples=50)
@CASES
def test_n_best_lists_are_sorted_and_have_no_translation_twice(seed: int, beam: int, normalization: float) -> None:
    found = best(Table(seed), beam, normalization, longest=7, n_best=beam)
    assert [hypothesis.score for hypothesis in found] == sorted((hypothesis.score for hypothesis in found), reverse=True)
    assert len({tuple(hypothesis.ids) for hypothesis in found}) == len(found)


def test_bad_endings_that_come_first_do_not_hide_a_better_translation() -> None:
    """After each piece, END is among the best candidates although the right translation has only begun."""
    steady = {tuple([4] * n): {4: 0.9, END: 0.05, 5: 0.05} for n in range(7)}
    found = best(Table(given=steady), beam=2, normalization=1.0, longest=20)
    assert found[0].ids == [4] * 7


def test_a_greedy_hypothesis_that_leaves_all_candidates_counts_though_another_one_ends_just_then() -> None:
    """After 5 4, END is the best candidate, and no extension of 4 4 is among the four that a beam of 2 looks at."""
    even = {4: 0.28, 5: 0.24, 6: 0.24, END: 0.24}
    after = {
        (): {4: 0.4, 5: 0.35, 6: 0.25},
        (4,): even,
        (5,): {4: 0.9, 5: 0.05, END: 0.05},
        (4, 4): even,
        (5, 4): {END: 0.4, 4: 0.2, 5: 0.2, 6: 0.2},
    }
    certain = {tuple([4] * n): {4: 1.0} for n in range(3, 8)}
    assert best(Table(given=after | certain), beam=2, normalization=1.0, longest=20)[0].ids == [4] * 8


def test_what_is_broken_off_is_a_result_only_if_nothing_has_ended() -> None:
    endless = {tuple([4] * n): {4: 0.98, 5: 0.02} for n in range(9)}
    found = best(Table(given=endless), beam=1, normalization=1.0, longest=5)
    assert [(hypothesis.ids, hypothesis.ended) for hypothesis in found] == [([4] * 4, False)]
    assert found[0].log_probability == pytest.approx(4 * math.log(0.98), abs=1e-3)
    ending = endless | {(4, 4): {4: 0.98, END: 0.02}}
    assert all(hypothesis.ended for hypothesis in best(Table(given=ending), 2, 1.0, longest=5, n_best=2))


def test_if_nothing_has_ended_the_results_are_the_best_of_what_was_broken_off() -> None:
    probabilities = {4: 0.6, 5: 0.3, 6: 0.1}
    endless = Table(given={words: probabilities for n in range(4) for words in itertools.product(WORDS, repeat=n)})
    for count in (1, 2, 3):
        found = best(endless, beam=3, normalization=1.0, longest=4, n_best=count)
        assert not any(hypothesis.ended for hypothesis in found)
        assert len({tuple(hypothesis.ids) for hypothesis in found}) == count
        assert [sorted(hypothesis.ids) for hypothesis in found] == [[4, 4, 4], *[[4, 4, 5]] * (count - 1)]
        logs = [sum(math.log(probabilities[piece]) for piece in hypothesis.ids) for hypothesis in found]
        assert [hypothesis.log_probability for hypothesis in found] == pytest.approx(logs, abs=1e-3)
        assert [hypothesis.score for hypothesis in found] == pytest.approx([log / 3 for log in logs], abs=1e-3)


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


def test_a_hypothesis_that_has_ended_replaces_the_same_one_broken_off() -> None:
    best = [Hypothesis([4, 5], -2.0, -1.0, ended=False)]
    _add(best, Hypothesis([4, 5], -3.0, -1.0), 1)
    assert [hypothesis.ended for hypothesis in best] == [True]
