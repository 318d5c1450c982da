"""Prefixes, terms and copies of unknown words in beam search, on models that are small enough to enumerate."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from enumerable import VOCABULARY, WORDS, Table
from hypothesis import given, settings
from hypothesis import strategies as st
from models import random_model

from nmt_train.corpus.batch import padding_mask
from nmt_train.corpus.vocabulary import END, UNKNOWN
from nmt_train.model.beam_search import Hypothesis, SearchConfig, search
from nmt_train.model.demand import NOTHING, Demand, Demands, PieceKinds
from nmt_train.model.ensemble import Ensemble
from nmt_train.model.sampling import Sampling, sample
from nmt_train.model.transformer import Transformer

CONTINUES = 6  # the only piece that continues a word; 4, 5 and END begin one


def kinds(size: int = VOCABULARY, continues: Sequence[int] = (CONTINUES,)) -> PieceKinds:
    flags = torch.zeros(size, dtype=torch.bool)
    flags[list(continues)] = True
    return PieceKinds(~flags, flags)


def searched(model: Table, config: SearchConfig, demand: Demand, continues: Sequence[int] = (CONTINUES,)) -> list[Hypothesis]:
    return search(model, torch.tensor([[4, END]]), None, config, Demands([demand], kinds(continues=continues)))[0]  # type: ignore[arg-type]


def sequences(longest: int) -> list[tuple[int, ...]]:
    """All translations of at most this number of pieces."""
    return [words for length in range(longest + 1) for words in itertools.product(WORDS, repeat=length)]


TERM = st.lists(st.sampled_from(WORDS), min_size=1, max_size=3).map(tuple)
DEMANDS = st.builds(
    Demand,
    prefix=st.lists(st.sampled_from(WORDS), max_size=2).map(tuple),
    word_ends=st.booleans(),
    terms=st.lists(TERM, max_size=3, unique=True).map(tuple),
)
CASES = given(
    seed=st.integers(0, 10**6), beam=st.integers(1, 6), normalization=st.sampled_from([0.0, 0.6, 1.0]), demand=DEMANDS
)


def satisfies(words: Sequence[int], demand: Demand) -> bool:
    """Whether a translation has its prefix, a new word after it if wanted, and each term, followed by no CONTINUES."""
    whole = (*words, END)
    start = len(demand.prefix)
    found = whole[:start] == demand.prefix and not (demand.word_ends and whole[start] == CONTINUES)
    text = "".join(map(str, whole))
    return found and all(
        any(
            text.startswith("".join(map(str, term)), place) and text[place + len(term)] != str(CONTINUES)
            for place in range(len(words) - len(term) + 1)
        )
        for term in demand.terms
    )


@pytest.mark.slow
@settings(max_examples=200)
@CASES
def test_every_translation_that_ends_has_what_is_demanded(seed: int, beam: int, normalization: float, demand: Demand) -> None:
    found = searched(Table(seed), SearchConfig(beam, normalization, n_best=beam), demand)
    assert found
    ended = [hypothesis for hypothesis in found if hypothesis.ended]
    assert all(satisfies(hypothesis.ids, demand) for hypothesis in ended)
    scores = [hypothesis.score for hypothesis in found]
    assert scores == sorted(scores, reverse=True)
    assert len({tuple(hypothesis.ids) for hypothesis in found}) == len(found)


@pytest.mark.slow
@settings(max_examples=60)
@CASES
def test_a_beam_as_large_as_the_space_finds_the_best_of_the_translations_that_have_it(
    seed: int, beam: int, normalization: float, demand: Demand
) -> None:
    demand = replace(demand, terms=tuple(term[:2] for term in demand.terms[:2]), prefix=demand.prefix[:1])
    model, longest = Table(seed), 5
    config = SearchConfig(400, normalization, length_factor=longest / 2, length_extra=1, n_best=beam)
    scores = {
        words: model.log_probability(words) / (len(words) + 1) ** normalization
        for words in sequences(longest)
        if satisfies(words, demand)
    }
    found = searched(model, config, demand)
    best = sorted(scores.values(), reverse=True)[:beam]
    assert [hypothesis.score for hypothesis in found if hypothesis.ended] == pytest.approx(best, abs=1e-4)


@pytest.mark.slow
@settings(max_examples=100)
@CASES
def test_with_a_prefix_too_a_beam_is_never_worse_than_greedy_search(
    seed: int, beam: int, normalization: float, demand: Demand
) -> None:
    model, own = Table(seed), replace(demand, terms=())
    wide, greedy = (searched(model, SearchConfig(size, normalization), own)[0] for size in (beam, 1))
    assert wide.ended >= greedy.ended
    assert wide.score >= greedy.score or not greedy.ended


@settings(max_examples=50)
@CASES
def test_terms_that_appear_anyway_change_nothing(seed: int, beam: int, normalization: float, demand: Demand) -> None:
    model, config = Table(seed), SearchConfig(beam, normalization)
    free = searched(model, config, replace(demand, terms=()))
    whole = (*free[0].ids, END)
    terms = tuple(whole[place : place + 1] for place in range(len(whole) - 1) if whole[place + 1] != CONTINUES)
    assert searched(model, config, replace(demand, terms=terms)) == free


def test_a_word_that_goes_on_is_not_the_term() -> None:
    steady = {tuple([5] * n): {5: 0.5, 4: 0.3, END: 0.2} for n in range(9)}
    after = {(*prefix, 4): {CONTINUES: 0.99, END: 0.01} for prefix in steady}
    found = searched(Table(given=steady | after), SearchConfig(beam=3), Demand(terms=((4,),)))
    assert found[0].ended
    assert 4 in found[0].ids
    assert CONTINUES not in found[0].ids


def test_one_occurrence_suffices_for_terms_that_overlap() -> None:
    even = dict.fromkeys([*WORDS, END], 0.25)
    model = Table(given=dict.fromkeys(sequences(8), even))
    found = searched(model, SearchConfig(beam=5, normalization=0.0), Demand(terms=((4, 5), (5, 4), (5,))), continues=())
    assert found[0].ids in ([4, 5, 4], [5, 4, 5])


def test_translations_that_do_not_end_have_the_terms_nevertheless() -> None:
    endless = {words: {4: 0.9, 5: 0.1} for words in sequences(8)}
    config = SearchConfig(beam=3, length_factor=0.0, length_extra=5, n_best=3)
    found = searched(Table(given=endless), config, Demand(terms=((5, 5),)))
    assert len({tuple(hypothesis.ids) for hypothesis in found}) == len(found) > 1
    assert not any(hypothesis.ended for hypothesis in found)
    assert all("55" in "".join(map(str, hypothesis.ids)) for hypothesis in found)


def test_unknown_pieces_appear_only_if_wanted_and_no_more_often() -> None:
    model = Table(given={tuple([UNKNOWN] * n): {UNKNOWN: 0.9, 4: 0.1} for n in range(9)})
    for wanted in range(3):
        assert searched(model, SearchConfig(beam=2), Demand(unknown=wanted))[0].ids == [UNKNOWN] * wanted + [4]
    assert searched(model, SearchConfig(beam=2), Demand(prefix=(UNKNOWN,), unknown=1))[0].ids == [UNKNOWN, UNKNOWN, 4]


# --- with transformers, in batches

PIECES = 30
SEARCH = SearchConfig(beam=4, n_best=3)
MIXED = [
    NOTHING,
    Demand(prefix=(7, 8)),
    Demand(terms=((9, 10), (11,))),
    Demand(prefix=(12,), word_ends=True, terms=((13, 14, 15),)),
    Demand(terms=((9, 10),)),
]


@pytest.fixture(scope="module")
def models() -> list[Transformer]:
    models = [random_model(PIECES, norm) for norm in ("pre", "post")]
    with torch.no_grad():
        models[0].target_embedding.mul_(0.3)  # so that translations end
    return models


def sources() -> torch.Tensor:
    torch.manual_seed(2)
    source = torch.randint(4, PIECES, (len(MIXED), 7))
    for row, length in enumerate((6, 3, 5, 4, 6)):
        source[row, length:] = 0
        source[row, length] = END
    return source


@pytest.mark.parametrize("several", [False, True])
def test_every_sentence_of_a_batch_gets_what_it_gets_alone(models: list[Transformer], several: bool) -> None:
    model = Ensemble(models) if several else models[0]
    source = sources()
    together = search(model, source, padding_mask(source), SEARCH, Demands(MIXED, kinds(PIECES)))
    for row, demand in enumerate(MIXED):
        length = int((source[row] != 0).sum())
        alone = search(model, source[row : row + 1, :length], None, SEARCH, Demands([demand], kinds(PIECES)))[0]
        assert [each.ids for each in together[row]] == [each.ids for each in alone]
        assert [each.score for each in together[row]] == pytest.approx([each.score for each in alone], abs=1e-4)
        assert all(satisfies_pieces(each, demand) for each in together[row])


def satisfies_pieces(hypothesis: Hypothesis, demand: Demand) -> bool:
    begins = tuple(hypothesis.ids[: len(demand.prefix)]) == demand.prefix
    return begins and demand.has_terms(hypothesis.ids, kinds(PIECES))


def test_without_demands_the_results_are_the_same_to_the_last_bit(models: list[Transformer]) -> None:
    source = sources()
    mask = padding_mask(source)
    plain = search(models[0], source, mask, SEARCH)
    assert search(models[0], source, mask, SEARCH, Demands([NOTHING] * len(source), kinds(PIECES))) == plain
    demands = [NOTHING, *[Demand(terms=((9,),))] * (len(source) - 1)]
    assert search(models[0], source, mask, SEARCH, Demands(demands, kinds(PIECES)))[0] == plain[0]


# --- samples


def sampled(model: Transformer, rows: Sequence[int], sampling: Sampling, n_best: int = 3) -> list[list[Hypothesis]]:
    source = sources()[list(rows)]
    return sample(model, source, padding_mask(source), SearchConfig(n_best=n_best), sampling, rows)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=5), Sampling(nucleus=0.8, seed=7)])
def test_samples_depend_on_the_seed_and_the_number_of_the_line_but_not_on_its_batch(
    models: list[Transformer], sampling: Sampling
) -> None:
    together = sampled(models[0], range(5), sampling)
    for row in range(5):
        assert [each.ids for each in sampled(models[0], [row], sampling)[0]] == [each.ids for each in together[row]]
    assert sampled(models[0], range(5), replace(sampling, seed=99)) != together
    assert len({tuple(each.ids) for each in together[0]}) > 1, "the samples of a line are independent"
    few = sampled(models[0], range(5), sampling, n_best=1)
    assert all(found[0].ids in [each.ids for each in many] for found, many in zip(few, together, strict=True))


@pytest.mark.parametrize("sampling", [Sampling(top_k=1), Sampling(nucleus=1e-6)])
def test_the_only_piece_that_may_be_drawn_is_that_of_greedy_search(models: list[Transformer], sampling: Sampling) -> None:
    source = sources()
    greedy = search(models[0], source, padding_mask(source), SearchConfig(beam=1))
    found = sampled(models[0], range(5), sampling, n_best=1)
    assert [each[0].ids for each in found] == [each[0].ids for each in greedy]
    for left, right in zip(found, greedy, strict=True):
        assert (left[0].log_probability, left[0].score) == pytest.approx((right[0].log_probability, right[0].score), abs=1e-4)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), {4: 0.5, 5: 0.3, 6: 0.2}),
        (Sampling(top_k=2), {4: 0.625, 5: 0.375}),
        (Sampling(nucleus=0.7), {4: 0.625, 5: 0.375}),
        (Sampling(nucleus=0.4), {4: 1.0}),
        (Sampling(top_k=2, nucleus=0.1), {4: 1.0}),
    ],
)
def test_pieces_are_drawn_with_their_probabilities(sampling: Sampling, expected: dict[int, float]) -> None:
    count = 2000
    model, source = Table(given={(): {4: 0.5, 5: 0.3, 6: 0.2}}), torch.tensor([[4, END]])
    found = sample(model, source, None, SearchConfig(n_best=count), sampling, [0])[0]  # type: ignore[arg-type]
    drawn = [each.ids[0] for each in found]
    for piece in WORDS:
        probability = expected.get(piece, 0.0)
        deviation = (probability * (1 - probability) / count) ** 0.5
        assert abs(drawn.count(piece) / count - probability) <= 4 * deviation


def test_samples_begin_with_the_prefix_and_are_broken_off_at_their_limit() -> None:
    endless = {words: {4: 0.9, 5: 0.1} for words in sequences(8)}
    source, config = torch.tensor([[4, END]]), SearchConfig(length_factor=0.0, length_extra=4, n_best=5)
    demands = Demands([Demand(prefix=(6,))], kinds())
    found = sample(Table(given=endless), source, None, config, Sampling(), [0], demands)[0]  # type: ignore[arg-type]
    assert all(not each.ended and each.ids[0] == 6 and len(each.ids) == 4 for each in found)
