"""Several training corpora: how much of an epoch each one is, exactly, whoever trains and wherever training resumes."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Make
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import run as simulated

from nmt_train import config as configuration
from nmt_train.common.errors import UserError
from nmt_train.corpus import BatchConfig, CorpusConfig, CorpusPart
from nmt_train.corpus.batches import Batches
from nmt_train.corpus.data_shard import DataShard, Position
from nmt_train.corpus.mixture import Mixture
from nmt_train.corpus.store import open_stores
from nmt_train.corpus.train_vocabulary import train
from nmt_train.corpus.vocabulary import Vocabulary
from nmt_train.training.start import _identity, start

FILES = ["a", "b"]


def mixture(sizes: list[int], *changes: dict[str, Any], temperature: float | None = None, seed: int = 1) -> Mixture:
    """A mixture of corpora of these sizes, whose pairs are numbered one corpus after another."""
    found = [CorpusPart(files=FILES, **change) for change in changes]  # type: ignore[arg-type]
    config = CorpusConfig(train=found, valid=FILES, temperature=temperature)  # type: ignore[arg-type]
    return Mixture(config, np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1]), seed)


def given_by(found: np.ndarray, sizes: list[int]) -> list[int]:
    return [int(count) for count in np.bincount(np.searchsorted(np.cumsum(sizes), found, side="right"), minlength=len(sizes))]


@settings(max_examples=50)
@given(sizes=st.lists(st.integers(1, 60), min_size=2, max_size=4), weights=st.lists(st.integers(1, 9), min_size=4, max_size=4))
def test_shares_are_those_of_the_weights_to_the_pair_and_every_pair_comes_equally_often(
    sizes: list[int], weights: list[int]
) -> None:
    mixed = mixture(sizes, *({"weight": weight} for weight in weights[: len(sizes)]))
    total, shares = sum(sizes), np.array(weights[: len(sizes)]) / sum(weights[: len(sizes)])
    often: Counter[int] = Counter()
    for epoch in range(6):
        pairs = mixed.pairs(epoch)
        assert len(pairs) == total
        assert np.abs(np.array(given_by(pairs, sizes)) - shares * total).max() <= 1
        often.update(pairs.tolist())
    for first, size in zip(np.cumsum([0, *sizes]), sizes, strict=False):
        counts = [often[pair] for pair in range(first, first + size)]
        assert max(counts) - min(counts) <= 1


def test_without_weights_every_pair_comes_once_in_an_epoch() -> None:
    mixed = mixture([5, 7], {}, {})
    assert [sorted(mixed.pairs(epoch)) for epoch in range(3)] == [list(range(12))] * 3


@pytest.mark.parametrize(("temperature", "counts"), [(1.0, [90, 10]), (2.0, [75, 25]), (1000.0, [50, 50])])
def test_a_temperature_evens_out_sizes(temperature: float, counts: list[int]) -> None:
    assert mixture([90, 10], {}, {}, temperature=temperature).counts(0) == counts


def test_a_corpus_ends_after_its_epochs_and_the_others_share_what_follows() -> None:
    mixed = mixture([30, 10], {"weight": 1, "until": "2e", "name": "crawled"}, {"weight": 3, "name": "clean"})
    assert [mixed.counts(epoch) for epoch in range(4)] == [[10, 30], [10, 30], [0, 10], [0, 10]]
    assert mixed.described() == [
        "corpus: from epoch 1 on, an epoch has 40 pairs:"
        " crawled 10 pairs (25.0%; it has 30), clean 30 pairs (75.0%; it has 10)",
        "corpus: from epoch 3 on, an epoch has 10 pairs: crawled 0 pairs (0.0%; it has 30), clean 10 pairs (100.0%; it has 10)",
    ]
    often = Counter(np.concatenate([mixed.pairs(epoch) for epoch in range(4)]).tolist())
    assert {often[pair] for pair in range(30, 40)} == {8}


def test_a_weight_may_change_with_the_epoch_and_passes_go_on() -> None:
    mixed = mixture([40, 10], {"weight": {1: 1, 3: 0, 4: 1}, "name": "crawled"}, {"weight": {2: 3, 3: 1}, "name": "clean"})
    assert [mixed.counts(epoch) for epoch in range(5)] == [[40, 0], [12, 38], [0, 10], [25, 25], [25, 25]]
    often = Counter(np.concatenate([mixed.pairs(epoch) for epoch in range(5)]).tolist())
    counts = [often[pair] for pair in range(40)]
    assert (sum(counts), max(counts) - min(counts)) == (102, 1)


@pytest.mark.parametrize("changes", [({}, {}), ({"weight": 1}, {"weight": 3})])
def test_an_epoch_may_have_any_length(changes: tuple[dict[str, Any], ...]) -> None:
    found = [CorpusPart(files=FILES, **change) for change in changes]
    config = CorpusConfig(train=found, valid=FILES, epoch=20)  # type: ignore[arg-type]
    mixed = Mixture(config, np.split(np.arange(40), [30]), 1)
    assert mixed.counts(0) == ([15, 5] if changes[0] == {} else [5, 15])
    often = Counter(np.concatenate([mixed.pairs(epoch) for epoch in range(4)]).tolist())
    assert sum(often.values()) == 80
    for first, end in ((0, 30), (30, 40)):
        counts = [often[pair] for pair in range(first, end)]
        assert max(counts) - min(counts) <= 1


def test_seed_and_epoch_determine_the_pairs() -> None:
    def drawn(seed: int, epoch: int) -> list[int]:
        return sorted(mixture([50, 50], {"weight": 1}, {"weight": 4}, seed=seed).pairs(epoch).tolist())

    assert drawn(1, 1) == drawn(1, 1)
    assert drawn(1, 1) != drawn(1, 0)
    assert drawn(1, 1) != drawn(2, 1)


@pytest.mark.parametrize(
    ("train", "temperature", "text"),
    [
        ([{"files": FILES, "weight": 1}, {"files": FILES}], None, "train needs a weight for every corpus, or for none"),
        ([{"files": FILES, "weight": 1}] * 2, 2.0, "temperature would replace the weights"),
        ([{"files": FILES, "until": "1e"}], None, "train has only corpora that end"),
        ([{"files": FILES, "name": "a"}] * 2, None, "train has two corpora with the same name"),
        ([{"files": FILES, "until": "5u"}, {"files": FILES}], None, "until 5u is not a number of epochs; write it as 3e"),
        ([{"files": FILES, "tag": "to German"}], None, "tag 'to German' cannot be one piece; write a word such as <2de>"),
        ([{"files": FILES, "tag": "</s>"}], None, "tag '</s>' cannot be one piece"),
        ([{"files": FILES}, "c"], None, "keys with their values|instance of"),
        ([{"files": FILES, "weight": {1: 1, 4: 0}}], None, "train has no corpus in epoch 4; give one of them a weight there"),
        ([{"files": FILES, "weight": {2: 1}}], None, "train has no corpus in epoch 1"),
        ([{"files": FILES, "weight": {0: 1}}], None, "epochs of at least 1"),
        ([{"files": FILES, "weight": {1: -1}}], None, "numbers of at least 0"),
        ([{"files": FILES, "weight": [1]}], None, "it should be a number, or numbers by epochs"),
    ],
)
def test_what_contradicts_itself_is_refused(train: Any, temperature: float | None, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        CorpusConfig(train=train, valid=FILES, temperature=temperature)


def two(demo: Path, **changes: Any) -> list[dict[str, Any]]:
    """The demo corpus, and its test set as a second one."""
    return [
        {"name": "large", "files": [f"{demo}/train.en", f"{demo}/train.de"], "weight": 1},
        {"name": "small", "files": [f"{demo}/test.en", f"{demo}/test.de"], "weight": 1, **changes},
    ]


def test_one_corpus_in_a_list_is_that_corpus(make: Make, demo: Path, vocabulary: Vocabulary, tmp_path: Path) -> None:
    plain = make().corpus
    listed = make(corpus__train=[{"files": list(plain.train)}]).corpus
    orders = []
    for corpus in (plain, listed):
        batches = Batches(open_stores(corpus, vocabulary, tmp_path), corpus, BatchConfig(), vocabulary, 1)
        orders.append([group.tolist() for group in batches.groups(1)])
    assert orders[0] == orders[1]


def test_the_batches_of_all_ranks_together_are_the_same_for_any_number(
    make: Make, demo: Path, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    corpus = make(corpus__train=two(demo)).corpus
    batches = Batches(open_stores(corpus, vocabulary, tmp_path), corpus, BatchConfig(tokens=500), vocabulary, 1)

    def trained(ranks: int) -> list[int]:
        shards = (DataShard(rank, ranks) for rank in range(ranks))
        picked = (shard.pick(1, batches.groups(1)) for shard in shards)
        return sorted(int(pair) for mine in picked for _, group, _ in mine if group is not None for pair in group)

    assert trained(1) == trained(2) == trained(5)
    assert given_by(np.array(trained(1)), [600, 20]) == [310, 310]


def test_a_batch_says_its_lines_in_their_files(make: Make, demo: Path, vocabulary: Vocabulary, tmp_path: Path) -> None:
    corpus = make(corpus__train=two(demo)).corpus
    batches = Batches(open_stores(corpus, vocabulary, tmp_path), corpus, BatchConfig(tokens=500), vocabulary, 1)
    batch = dataclasses.replace(next(batches.stream(DataShard(), Position())).batch, pairs=(619, 3, 600))
    assert batches.described(batch) == "corpus.train, large, lines 4; corpus.train, small, lines 20, 1"


def test_a_tag_is_one_piece_before_every_source_as_if_it_were_in_the_text(make: Make, demo: Path, tmp_path: Path) -> None:
    corpus = make(corpus__train=two(demo, tag="<2de>")).corpus
    vocabulary = train(corpus)
    stores = open_stores(corpus, vocabulary, tmp_path)
    line = (demo / "test.en").read_text(encoding="utf-8").splitlines()[0]
    source, _ = stores[600]
    assert source.tolist() == vocabulary.encode([f"<2de> {line}"])[0]
    assert [vocabulary.piece(int(piece)) for piece in source[:2]] == ["▁", "<2de>"]
    assert len(source) == stores.lengths()[1][0][0]
    assert stores[0][0].tolist() == vocabulary.encode([(demo / "train.en").read_text(encoding="utf-8").splitlines()[0]])[0]


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [None, [2, 1]])
def test_a_run_resumes_within_a_mixture_bit_for_bit(make: Make, demo: Path, tmp_path: Path, nodes: list[int] | None) -> None:
    changes: dict[str, Any] = {"corpus__train": two(demo, until="2e"), "mode": "sync" if nodes else "single"}

    def go(name: str, stop: str) -> bytes:
        if nodes:
            simulated(make, tmp_path / name, nodes, stop__after=stop, **changes)
        else:
            config = dataclasses.replace(make(stop__after=stop, **changes), run=str(tmp_path / name))
            assert start(config, False, False) == 0
        return (tmp_path / name / "last" / "parameters.safetensors").read_bytes()

    whole = go("whole", "9u")
    go("parts", "4u")
    assert go("parts", "9u") == whole
    log = (tmp_path / "whole" / "train.log").read_text(encoding="utf-8")
    assert "corpus: from epoch 1 on, an epoch has 620 pairs: large 310 pairs (50.0%; it has 600), small 310" in log
    assert "from epoch 3 on, an epoch has 600 pairs: large 600 pairs (100.0%; it has 600), small 0" in log


@pytest.mark.slow
def test_a_run_with_weights_by_epochs_and_short_epochs_resumes_bit_for_bit(make: Make, demo: Path, tmp_path: Path) -> None:
    train = two(demo)
    train[0]["weight"], train[1]["weight"] = {1: 3, 2: 1}, {1: 0, 2: 2, 4: 1}

    def go(name: str, stop: str) -> bytes:
        config = make(stop__after=stop, corpus__train=train, corpus__epoch=100)
        assert start(dataclasses.replace(config, run=str(tmp_path / name)), False, False) == 0
        return (tmp_path / name / "last" / "parameters.safetensors").read_bytes()

    whole = go("whole", "14u")
    go("parts", "10u")  # in epoch 4
    assert go("parts", "14u") == whole
    log = (tmp_path / "whole" / "train.log").read_text(encoding="utf-8")
    for epoch, large, small in ((1, 100, 0), (2, 33, 67), (4, 50, 50)):
        assert f"from epoch {epoch} on, an epoch has 100 pairs: large {large} pairs" in log
        assert f"small {small} pairs" in log
    assert "14 updates, 4." in log


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"files": FILES, "wieght": 3}, r"corpus.train: corpus 1: wieght: there is no such key"),
        ({"files": FILES, "weight": -1}, r"corpus.train: corpus 1: weight: it should be greater than 0, not -1"),
        ({"weight": 1}, r"corpus.train: corpus 1: files is missing"),
    ],
)
def test_a_mistake_in_an_entry_is_named(make: Make, entry: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        make(corpus__train=[entry])


def test_a_mistake_in_an_entry_is_found_at_its_line(tmp_path: Path) -> None:
    text = """\
run: runs/mine
corpus:
  train:
    - files: [a.en, a.de]
      weight: -1
    - files: [b.en, b.de]
      weight: 2
  valid: [c.en, c.de]
"""
    path = tmp_path / "mine.yml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"mine.yml, line 5: corpus.train: corpus 1: weight: "):
        configuration.load([str(path)], {})
    other = tmp_path / "other.yml"
    other.write_text("corpus:\n  train:\n    - files: [d.en, d.de]\n    - weight: 2\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"other.yml, line 4: corpus.train: corpus 2: files is missing"):
        configuration.load([str(path), str(other)], {})
    with pytest.raises(UserError, match=r"^command line: corpus.train: corpus 1: weight: "):
        configuration.load([str(path)], {"corpus.train": "[{files: [c.en, c.de], weight: -2}]"})


@pytest.mark.parametrize("change", [{"weight": 2}, {"until": "3e"}, {"tag": "de"}])
def test_ranks_with_other_weights_stages_or_tags_notice(
    make: Make, demo: Path, vocabulary: Vocabulary, tmp_path: Path, change: dict[str, Any]
) -> None:
    configs = [make(corpus__train=two(demo, **changes)) for changes in ({}, change)]
    one, other = (_identity(config, open_stores(config.corpus, vocabulary, tmp_path)) for config in configs)
    assert one != other


def test_weights_by_epochs_are_saved_and_read_back_without_a_warning(make: Make) -> None:
    settled = make(corpus__train=[{"files": FILES, "weight": {1: 1, 4: 0.5}}, {"files": FILES, "weight": 2, "until": "3e"}])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = json.loads(json.dumps(configuration.plain(settled)))
        again = configuration.validate(values, {})
    assert again.corpus == settled.corpus
    assert again.corpus.parts[0].weight == {1: 1.0, 4: 0.5}
