from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nmt_train.common.duration import Duration
from nmt_train.common.errors import UserError
from nmt_train.corpus import BatchConfig, CorpusConfig
from nmt_train.corpus.batch import Batch, assemble, fitting
from nmt_train.corpus.batches import Batches
from nmt_train.corpus.data_shard import DataShard, Position
from nmt_train.corpus.side import Side
from nmt_train.corpus.store import Store, Stores, open_stores
from nmt_train.corpus.vocabulary import BEGIN, END, PAD, Vocabulary
from nmt_train.corpus.vocabulary_config import VocabularyConfig

CORPUS = CorpusConfig(train=["a", "b"], valid=["a", "b"], max_length=30, max_skipped=1.0)


def store_of(lengths: list[tuple[int, int]]) -> Stores:
    """Pairs whose sides have these lengths; ids count up from 10 so that every piece is different."""
    sides = []
    for column in (0, 1):
        offsets = np.concatenate(([0], np.cumsum([pair[column] for pair in lengths]))).astype(np.int64)
        sides.append(Side(np.arange(offsets[-1]) % 50_000 + 10, offsets))
    return Stores([Store(Path("nowhere"), *sides)], [np.array([])])


def batches_of(stores: Stores, vocabulary: Vocabulary, tokens: int = 64, seed: int = 1, **corpus: object) -> Batches:
    config = replace(CORPUS, **corpus)  # type: ignore[arg-type]
    return Batches(stores, config, BatchConfig(tokens=tokens), vocabulary, seed)


LENGTHS = st.lists(st.tuples(st.integers(0, 35), st.integers(0, 35)), min_size=1, max_size=120)


@settings(max_examples=60)
@given(lengths=LENGTHS, epoch=st.integers(0, 3), window=st.integers(1, 50))
def test_every_kept_pair_is_in_exactly_one_batch_of_an_epoch_and_every_batch_fits(
    vocabulary: Vocabulary, lengths: list[tuple[int, int]], epoch: int, window: int
) -> None:
    kept = [i for i, (source, target) in enumerate(lengths) if min(source, target) > 0 and max(source, target) <= 30]
    if not kept:
        with pytest.raises(UserError, match="no pair is left"):
            batches_of(store_of(lengths), vocabulary)
        return
    batches = batches_of(store_of(lengths), vocabulary, window=window)
    groups = list(batches.groups(epoch))
    assert sorted(int(pair) for group in groups for pair in group) == kept
    assert all(len(group) * (1 + max(lengths[pair][1] for pair in group)) <= 64 for group in groups)
    left_out = batches.left_out
    assert left_out.empty == sum(min(pair) == 0 for pair in lengths)
    assert left_out.empty + left_out.long + len(kept) == left_out.total == len(lengths)


def test_a_batch_holds_its_sentences_and_nothing_else() -> None:
    batch = assemble([np.array([7, 8]), np.array([9])], [np.array([4]), np.array([5, 6])])
    assert batch.source.tolist() == [[7, 8, END], [9, END, PAD]]
    assert batch.target_in.tolist() == [[BEGIN, 4, PAD], [BEGIN, 5, 6]]
    assert batch.target_out.tolist() == [[4, END, PAD], [5, 6, END]]
    assert batch.source_mask is not None
    assert batch.source_mask[:, 0, 0].isinf().tolist() == [[False] * 3, [False, False, True]]
    assert batch.target_filled is not None
    assert batch.target_filled.tolist() == [0, 1, 3, 4, 5]
    assert (batch.source_tokens, batch.target_tokens) == (5, 5)
    full = assemble([np.array([7]), np.array([9])], [np.array([4]), np.array([5])])
    assert full.source_mask is None
    assert full.target_filled is None


def same(left: Batch, right: Batch) -> bool:
    return (
        left.pairs == right.pairs and torch.equal(left.source, right.source) and torch.equal(left.target_out, right.target_out)
    )


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [0.0, 0.2])
def test_a_stream_begun_in_the_middle_goes_on_as_the_whole_one_does(
    demo: Path, vocabulary: Vocabulary, tmp_path: Path, sampling: float
) -> None:
    corpus = CorpusConfig(
        train=[f"{demo}/train.en", f"{demo}/train.de"], valid=["a", "b"], max_length=60, window=250,
        vocabulary=VocabularyConfig(sampling=sampling),
    )  # fmt: skip
    store = open_stores(corpus, vocabulary, tmp_path)
    batches = Batches(store, corpus, BatchConfig(tokens=500), vocabulary, seed=3)
    whole = list(islice(batches.stream(DataShard(), Position()), 120))
    ends = [number for number, turn in enumerate(whole) if turn.last]
    assert len(ends) >= 2
    assert ends[0] + 1 == len(list(batches.groups(0)))
    for start in (1, 17, ends[0]):
        resumed = batches.stream(DataShard(), Position(0, start))
        assert all(
            same(left.batch, right.batch) and left[1:] == right[1:] for left, right in zip(whole[start:], resumed, strict=False)
        )
    second = batches.stream(DataShard(), Position(1, 2))
    assert same(next(second).batch, whole[ends[0] + 3].batch)


def test_turns_say_how_much_of_the_corpus_came_before_them_the_same_for_all_workers(vocabulary: Vocabulary) -> None:
    batches = batches_of(store_of([(5, n % 20 + 1) for n in range(200)]), vocabulary)
    for stages in ([], [[Position(0, 2), Position(0, 1)]]):
        shards = [DataShard(rank, 3, stages, even=True) for rank in range(3)]
        turns = list(zip(*(islice(batches.stream(shard, Position()), 25) for shard in shards), strict=True))
        assert all(len({turn.epochs for turn in each}) == 1 for each in turns)
        places = [each[0].epochs for each in turns]
        assert places == sorted(places)
        done = sum(position.batches for stage in stages for position in stage)
        assert places[0] == done / len(list(batches.groups(0)))
        firsts = [each[0].epochs for before, each in pairwise(turns) if before[0].last]
        assert firsts == [float(epoch) for epoch in range(1, len(firsts) + 1)]
        assert firsts


def test_a_length_in_tokens_as_epochs(vocabulary: Vocabulary) -> None:
    batches = batches_of(store_of([(5, 9)] * 100), vocabulary)
    assert batches.epochs(Duration.parse("2500t")) == 2.5
    assert batches.epochs(Duration.parse("3e")) == 3
    assert batches.epochs(Duration.parse("1000000Gt")) == pytest.approx(1e12)  # at once
    assert batches.epochs(Duration.parse("3u")) == batches.epochs(None) == math.inf


def test_seed_and_epoch_determine_the_order(vocabulary: Vocabulary) -> None:
    store = store_of([(5, 5)] * 200)

    def order(seed: int, epoch: int) -> list[int]:
        return [int(pair) for group in batches_of(store, vocabulary, seed=seed).groups(epoch) for pair in group]

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)


def test_length_groups_leave_little_padding(demo: Path, vocabulary: Vocabulary, tmp_path: Path) -> None:
    store = open_stores(replace(CORPUS, train=[f"{demo}/train.en", f"{demo}/train.de"]), vocabulary, tmp_path)
    batches = Batches(store, CORPUS, BatchConfig(tokens=200), vocabulary, seed=1)
    epoch = [turn.batch for turn in islice(batches.stream(DataShard(), Position()), len(list(batches.groups(0))))]
    filled = sum(batch.source_tokens + batch.target_tokens for batch in epoch)
    assert filled / sum(batch.source.numel() + batch.target_out.numel() for batch in epoch) > 0.85


def test_batches_of_a_fixed_number_of_sentences(vocabulary: Vocabulary) -> None:
    store = store_of([(5, n % 20 + 1) for n in range(103)])
    groups = list(Batches(store, CORPUS, BatchConfig(sentences=10), vocabulary, seed=1).groups(0))
    assert sorted(map(len, groups)) == [3, *[10] * 10]


def test_too_many_left_out_is_an_error_if_so_configured(vocabulary: Vocabulary) -> None:
    store = store_of([(5, 5)] * 90 + [(5, 99)] * 10)
    assert str(batches_of(store, vocabulary).left_out) == "0 with an empty side, 10 over-long, of 100 pairs"
    with pytest.raises(
        UserError, match=r"10\.0% of the pairs would be left out .* of [\d,]+ pairs.* corpus\.max_skipped 5\.0%"
    ):
        batches_of(store, vocabulary, max_skipped=0.05)


def test_by_default_a_corpus_of_which_most_is_left_out_is_refused(vocabulary: Vocabulary) -> None:
    corpus = CorpusConfig(train=["a", "b"], valid=["a", "b"], max_length=30)
    enough, few = store_of([(5, 5)] * 80 + [(5, 99)] * 20), store_of([(5, 5)] * 8 + [(5, 99)] * 90 + [(0, 5)] * 2)
    assert len(Batches(enough, corpus, BatchConfig(), vocabulary, seed=1)) == 80
    counts = (
        ".*2 with an empty side, 90 over-long, of 100 pairs.*corpus.max_skipped 20.0%; raise it or corpus.max_length 30: the"
        r" longer side has up to 99 in 50%, 99 in 90%, .* of these pairs \[pieces\]"
    )
    with pytest.raises(UserError, match=rf"92\.0% of the pairs would be left out {counts}"):
        Batches(few, corpus, BatchConfig(), vocabulary, seed=1)


def test_a_batch_too_small_for_the_longest_sentence_is_refused(vocabulary: Vocabulary) -> None:
    with pytest.raises(UserError, match="batch.tokens: 30 cannot hold one sentence of corpus.max_length 30"):
        batches_of(store_of([(5, 5)]), vocabulary, tokens=30)


def test_sentences_longer_than_usual_count_by_their_square() -> None:
    assert [fitting(longest, 2048) for longest in (1, 256, 512, 1024, 4000)] == [2048, 8, 2, 1, 1]
    assert fitting(4000, 1_000_000) == 16


def test_workers_of_one_process_sort_each_window_once(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    sorts, lexsort = [0], np.lexsort

    def counted(keys: tuple[np.ndarray, ...]) -> np.ndarray:
        sorts[0] += 1
        return lexsort(keys)

    monkeypatch.setattr(np, "lexsort", counted)
    batches = batches_of(store_of([(length % 20 + 1, length % 25 + 1) for length in range(200)]), vocabulary, window=50)
    streams = [batches.stream(DataShard(rank, 8), Position()) for rank in range(8)]
    trained = []
    for stream in streams:
        for turn in stream:
            trained += turn.batch.pairs
            if turn.last:
                break
    assert sorted(trained) == list(range(200))
    assert sorts[0] == 4


def test_threads_may_read_the_same_epoch_at_the_same_time(vocabulary: Vocabulary) -> None:
    """As when a worker begins again while the thread of its earlier batches ends, or simulated workers share a corpus."""
    lengths = [(1 + number % 9, 1 + number % 7) for number in range(400)]
    expected = [tuple(group) for group in batches_of(store_of(lengths), vocabulary, window=20).groups(0)]
    for _ in range(20):
        shared, together = batches_of(store_of(lengths), vocabulary, window=20), threading.Barrier(4)

        def read(shared: Batches = shared, together: threading.Barrier = together) -> list[tuple[int, ...]]:
            together.wait()
            return [tuple(group) for group in shared.groups(0)]

        with ThreadPoolExecutor(4) as pool:
            assert [read_.result() for read_ in [pool.submit(read) for _ in range(4)]] == [expected] * 4
