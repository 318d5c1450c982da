"""Weights of single pairs in the cost."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Make
from models import random_batch, random_model

from nmt_train.common.errors import UserError
from nmt_train.corpus import BatchConfig
from nmt_train.corpus.batches import Batches
from nmt_train.corpus.data_shard import DataShard, Position
from nmt_train.corpus.store import open_stores
from nmt_train.corpus.vocabulary import Vocabulary


def batches(make: Make, train: list[dict[str, Any]], vocabulary: Vocabulary, folder: Path) -> Batches:
    corpus = make(corpus__train=train).corpus
    return Batches(open_stores(corpus, vocabulary, folder), corpus, BatchConfig(tokens=500), vocabulary, 1)


def tsv(folder: Path, weights: list[str]) -> list[str]:
    path = folder / "pairs.tsv"
    path.write_text("".join(f"six\ttwelve\t{weight}\n" for weight in weights), encoding="utf-8")
    return [str(path)]


@pytest.mark.parametrize("form", ["column", "file"])
def test_every_pair_carries_its_weight_and_a_corpus_without_any_has_ones(
    make: Make, vocabulary: Vocabulary, tmp_path: Path, form: str
) -> None:
    files, weights = tsv(tmp_path, ["0.5", "2", "0"]), "column"
    (tmp_path / "plain").mkdir()
    plain = tsv(tmp_path / "plain", ["9"])
    if form == "file":
        weights = str(tmp_path / "weights")
        Path(weights).write_text("0.5\n2\n0\n", encoding="utf-8")
    train = [{"name": "a", "files": files, "sentence_weights": weights}, {"name": "b", "files": plain}]
    batch = next(batches(make, train, vocabulary, tmp_path / "store").stream(DataShard(), Position())).batch
    assert dict(zip(batch.pairs, batch.weights.tolist(), strict=True)) == {0: 0.5, 1: 2.0, 2: 0.0, 3: 1.0}


def test_new_weights_are_a_new_corpus(make: Make, vocabulary: Vocabulary, tmp_path: Path) -> None:
    paths, checksums = set(), set()
    for weights in (None, "column"):
        train = [{"files": tsv(tmp_path, ["0.5", "2"]), "sentence_weights": weights}]
        stores = open_stores(make(corpus__train=train).corpus, vocabulary, tmp_path)
        paths.add(stores.paths[0])
        checksums.add(stores.identity[0]["checksum"])
    assert len(paths) == len(checksums) == 2


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (["1", "x"], r"pairs.tsv, line 2: the weight 'x' is not a number from 0 to 1,000,000"),
        (["1", "1e39"], r"pairs.tsv, line 2: the weight '1e39' is not a number from 0 to"),
        (["1", "-1"], "the weight '-1'"),
        (["nan", "1"], "line 1: the weight 'nan'"),
        (["1", ""], "the weight ''"),
    ],
)
def test_what_is_no_weight_is_named(make: Make, vocabulary: Vocabulary, tmp_path: Path, weights: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        batches(make, [{"files": tsv(tmp_path, weights), "sentence_weights": "column"}], vocabulary, tmp_path)


def test_there_must_be_a_weight_for_every_pair(make: Make, vocabulary: Vocabulary, tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("1\n", encoding="utf-8")
    train = [{"files": tsv(tmp_path, ["1", "1"]), "sentence_weights": str(tmp_path / "weights")}]
    with pytest.raises(UserError, match=r"corpus.train: sentence_weights: .*weights has 1 lines, and the corpus 2"):
        batches(make, train, vocabulary, tmp_path)


def test_columns_need_columns(make: Make, demo: Path, vocabulary: Vocabulary, tmp_path: Path) -> None:
    train = [{"files": [f"{demo}/train.en", f"{demo}/train.de"], "sentence_weights": "column"}]
    with pytest.raises(UserError, match=r"sentence_weights: column is for .tsv files"):
        batches(make, train, vocabulary, tmp_path)


def test_the_loss_is_the_sum_of_the_sentences_losses_times_their_weights() -> None:
    torch.manual_seed(1)
    model, batch = random_model(50, "pre"), random_batch(50)
    model.eval()
    each = []
    for row in range(len(batch)):
        only = torch.zeros(len(batch))
        only[row] = 1.0
        each.append(model.loss(dataclasses.replace(batch, weights=only)).item())
    assert sum(each) == pytest.approx(model.loss(batch).item(), rel=1e-5)
    weights = torch.arange(float(len(batch)))
    expected = sum(weight * value for weight, value in zip(weights.tolist(), each, strict=True))
    assert model.loss(dataclasses.replace(batch, weights=weights)).item() == pytest.approx(expected, rel=1e-5)
