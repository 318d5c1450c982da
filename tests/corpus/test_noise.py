"""Random changes of training sentences."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Make

from nmt_train.common.errors import UserError
from nmt_train.corpus import BatchConfig
from nmt_train.corpus.batch import Batch
from nmt_train.corpus.batches import Batches
from nmt_train.corpus.data_shard import DataShard, Position
from nmt_train.corpus.noise import Noise
from nmt_train.corpus.store import open_stores
from nmt_train.corpus.vocabulary import END, Vocabulary

PAIR = ("Ein Hund läuft schnell.", "A dog runs fast!")


def changed(noise: Noise, seed: int = 1) -> tuple[str, str]:
    return noise.apply(*PAIR, np.random.default_rng(seed))


@pytest.mark.parametrize(
    ("noise", "pair"),
    [
        (Noise(), PAIR),
        (Noise(upper=1), ("EIN HUND LÄUFT SCHNELL.", "A DOG RUNS FAST!")),
        (Noise(lower=1), ("ein hund läuft schnell.", "a dog runs fast!")),
        (Noise(title=1), ("Ein Hund Läuft Schnell.", "A Dog Runs Fast!")),
        (Noise(no_end=1), ("Ein Hund läuft schnell", "A dog runs fast")),
        (Noise(upper=1, lower=1, no_end=1), ("EIN HUND LÄUFT SCHNELL", "A DOG RUNS FAST")),
    ],
)
def test_each_change_does_what_it_says(noise: Noise, pair: tuple[str, str]) -> None:
    assert changed(noise) == pair


def test_a_typing_error_swaps_drops_or_doubles_a_letter_of_the_source() -> None:
    lengths = set()
    for seed in range(30):
        source, target = changed(Noise(typos=1), seed)
        assert target == PAIR[1]
        different = [(old, new) for old, new in zip(PAIR[0].split(), source.split(), strict=True) if old != new]
        assert len(different) <= 1  # two equal letters may be swapped
        lengths |= {len(new) - len(old) for old, new in different}
    assert lengths == {-1, 0, 1}


def test_a_sentence_that_is_only_punctuation_stays() -> None:
    assert Noise(no_end=1).apply("...", "!", np.random.default_rng(1)) == ("...", "!")


def test_a_probability_is_a_share_of_the_sentences() -> None:
    random = np.random.default_rng(1)
    upper = sum(Noise(upper=0.2).apply(*PAIR, random)[0].isupper() for _ in range(1000))
    assert 150 < upper < 250


def batches(make: Make, demo: Path, vocabulary: Vocabulary, folder: Path, **part: Any) -> Batches:
    corpus = make(corpus__train=[{"files": [f"{demo}/train.en", f"{demo}/train.de"], **part}]).corpus
    return Batches(open_stores(corpus, vocabulary, folder), corpus, BatchConfig(tokens=500), vocabulary, 1)


def texts(vocabulary: Vocabulary, batch: Batch) -> list[list[str]]:
    return [vocabulary.decode([row[row != END].tolist() for row in side]) for side in (batch.source, batch.target_out)]


def test_batches_contain_changed_sentences_the_same_in_every_process(
    make: Make, demo: Path, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    changes = ({}, *[{"noise": {"no_end": 0.2, "typos": 0.2}}] * 2)
    plain, noisy, again = (
        [
            found.batch
            for found in islice(batches(make, demo, vocabulary, tmp_path, **change).stream(DataShard(), Position()), 5)
        ]
        for change in changes
    )
    assert [texts(vocabulary, batch) for batch in noisy] == [texts(vocabulary, batch) for batch in again]
    assert [batch.pairs for batch in plain] == [batch.pairs for batch in noisy]
    before, after = ([line for batch in side for line in texts(vocabulary, batch)[0]] for side in (plain, noisy))
    assert 0 < sum(old != new for old, new in zip(before, after, strict=True)) < len(before)


def test_a_tag_stays_and_a_sentence_that_would_become_too_long_is_not_changed(
    make: Make, demo: Path, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    its = batches(make, demo, vocabulary, tmp_path, noise={"lower": 1.0}, tag="six")
    batch = next(its.stream(DataShard(), Position())).batch
    assert all(text.startswith("six ") for text in texts(vocabulary, batch)[0])
    its._longest = 1
    long = next(its.stream(DataShard(), Position())).batch
    plain = next(batches(make, demo, vocabulary, tmp_path, tag="six").stream(DataShard(), Position())).batch
    assert texts(vocabulary, long) == texts(vocabulary, plain) != texts(vocabulary, batch)


@pytest.mark.parametrize(
    ("noise", "said"),
    [
        ({"upper": 1.5}, r"noise.upper: it should be less than or equal to 1"),
        ({"shout": 0.1}, "noise.shout: there is no such key"),
    ],
)
def test_a_mistake_is_named(make: Make, noise: dict[str, float], said: str) -> None:
    with pytest.raises(UserError, match=f"corpus.train: corpus 1: {said}"):
        make(corpus__train=[{"files": ["a", "b"], "noise": noise}])
