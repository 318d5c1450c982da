"""Pieces that a vocabulary gains: appended to its SentencePiece models, never split, and made of old pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import Make
from models import random_batch, random_model
from sentencepiece import sentencepiece_model_pb2

from nmt_train.corpus.new_pieces import extended, extends, parts_of_new
from nmt_train.corpus.train_vocabulary import train
from nmt_train.corpus.vocabulary import (  # fmt: skip
    END,
    SOURCE,
    TARGET,
    UNKNOWN,
    SeparateVocabularies,
    Vocabulary,
    VocabularyPair,
)
from nmt_train.model.new_embeddings import with_new_pieces

NEW = ["<name>", "▁sieben", "漢字", "a" * 300]
KINDS = ["unigram", "bpe", "char", "word"]


def trained(make: Make, kind: str) -> Vocabulary:
    return train(make(corpus__vocabulary={"size": 20_000 if kind == "word" else 120, "type": kind}).corpus)


@pytest.mark.parametrize("kind", KINDS)
def test_new_pieces_follow_the_old_ones_and_are_never_split(make: Make, demo: Path, kind: str) -> None:
    old = trained(make, kind)
    new = extended(old, ["<name>", "漢字", "<name>"])
    assert len(new) == len(old) + 2
    assert extends(new, old)
    assert not extends(old, new)
    assert [new.piece(len(old) + i).removeprefix("▁") for i in range(2)] == ["<name>", "漢字"]
    lines = (demo / "train.de").read_text(encoding="utf-8").split("\n")[:100]
    assert new.encode(lines) == old.encode(lines), "other text has the same ids"
    for piece in ("<name>", "漢字"):
        assert len({*new.encode([f"zwei {piece}"])[0]} & {len(old), len(old) + 1}) == 1
    assert new.decode(new.encode(["zwei <name> 漢字"])) == ["zwei <name> 漢字"]
    assert Vocabulary.read(new.model, "here").digest == new.digest
    assert extended(new, ["漢字", "<name>"]).digest == new.digest, "it has them already"


def test_what_is_appended_is_what_the_format_says(vocabulary: Vocabulary) -> None:
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(extended(vocabulary, NEW).model)
    assert [(piece.piece, piece.score, piece.type) for piece in model.pieces][len(vocabulary) :] == [
        (text, 0.0, 4) for text in NEW
    ]


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_a_new_piece_consists_of_the_old_pieces_of_its_text(make: Make, kind: str) -> None:
    old = trained(make, kind)
    new = extended(old, ["▁einundzwanzig", "undzwan", "漢字", "zwan漢"])
    whole, inside, unknown, half = parts_of_new(new, old, TARGET)
    assert old.decode([whole, inside, half]) == ["einundzwanzig", "undzwan", "zwan"]
    assert old.piece(inside[0])[0] != "▁", "inside a word, there is no space before it"
    assert unknown == list(range(END + 1, len(old)))
    assert not {UNKNOWN} & {*whole, *inside, *half}


@pytest.mark.parametrize("tied", ["all", "target-output", "none"])
def test_the_longer_model_has_the_same_logits_for_the_old_pieces(vocabulary: Vocabulary, tied: str) -> None:
    new = extended(vocabulary, ["<name>", "▁sieben"])
    model = random_model(len(vocabulary), "pre", tied, output_bias=True)
    longer = random_model(len(new), "pre", tied, output_bias=True)
    longer.load_state_dict(with_new_pieces(model.state_dict(), new, vocabulary))
    batch = random_batch(len(vocabulary))
    with torch.inference_mode():
        old_logits, logits = (
            torch.nn.functional.linear(
                its.states(batch.source, batch.source_mask, batch.target_in), its.output_matrix, its.output_bias
            )
            for its in (model, longer)
        )
    assert torch.equal(logits[..., : len(vocabulary)], old_logits)
    for row, parts in enumerate(parts_of_new(new, vocabulary, TARGET), len(vocabulary)):
        torch.testing.assert_close(logits[..., row], old_logits[..., parts].mean(-1))
        torch.testing.assert_close(longer.source_matrix[row], model.source_matrix[parts].mean(0))


def test_each_of_separate_vocabularies_gains_them(make: Make) -> None:
    old = train(make(corpus__vocabulary={"size": [90, 110]}).corpus)
    new = extended(old, ["<name>"])
    assert isinstance(new, SeparateVocabularies)
    assert new.size == [91, 111]
    assert extends(new, old)
    model = random_model([90, 110], "pre", "none")
    found = with_new_pieces(model.state_dict(), new, old)
    assert [len(found[f"{name}_embedding"]) for name in ("source", "target", "output")] == [91, 111, 111]
    for side, matrix in ((SOURCE, model.source_matrix), (TARGET, model.target_embedding)):
        (parts,) = parts_of_new(new, old, side)
        name = "source_embedding" if side == SOURCE else "target_embedding"
        torch.testing.assert_close(found[name][-1], matrix[parts].mean(0))


def test_a_pair_with_one_table_gains_codes_that_sentencepiece_does_not_see(make: Make) -> None:
    side = trained(make, "unigram")
    pieces = [side.piece(number) for number in range(len(side))]
    old = VocabularyPair.join(side.model, side.model, pieces, "here")
    new = extended(old, [">>nds<<", "<name>"])
    assert extends(new, old)
    assert new.encode([">>nds<< zwei <name>"])[0][:: len(new.encode([">>nds<< zwei <name>"])[0]) - 1] == [
        len(old),
        len(old) + 1,
    ]
    assert new.knows(">>nds<<")
    assert not old.knows(">>nds<<")
    assert new.encode(["zwei <name>"], TARGET)[0][-1] == len(old) + 1


def test_a_vocabulary_of_another_kind_or_order_is_no_extension(make: Make, vocabulary: Vocabulary) -> None:
    assert not extends(trained(make, "bpe"), vocabulary)
    assert not extends(train(make(corpus__vocabulary={"size": [90, 110]}).corpus), vocabulary)
    assert extends(vocabulary, vocabulary)
