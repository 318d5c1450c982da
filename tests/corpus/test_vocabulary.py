from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from conftest import Make

from nmt_train.common.errors import UserError
from nmt_train.corpus.train_vocabulary import train
from nmt_train.corpus.vocabulary import BEGIN, END, PAD, UNKNOWN, Vocabulary
from nmt_train.training.start import start


def test_text_survives_encoding_and_decoding(vocabulary: Vocabulary, demo: Path) -> None:
    lines = (demo / "train.de").read_text(encoding="utf-8").split("\n")[:100]
    ids = vocabulary.encode(lines)
    assert vocabulary.decode(ids) == lines
    assert not {PAD, UNKNOWN, BEGIN, END} & {i for line in ids for i in line}


def test_padding_begin_and_end_leave_nothing_in_the_text(vocabulary: Vocabulary) -> None:
    ids = vocabulary.encode(["zwei Kisten"])[0]
    assert vocabulary.decode([[BEGIN, *ids, END, PAD, PAD]]) == ["zwei Kisten"]


def test_training_is_repeatable(make: Make, vocabulary: Vocabulary) -> None:
    assert train(make().corpus).digest == vocabulary.digest


def test_another_segmentation_has_the_same_text_and_likely_ones_come_often(vocabulary: Vocabulary) -> None:
    text = "einundzwanzig nach vier"
    ids = np.array(vocabulary.encode([text])[0])
    random = np.random.default_rng(1)
    drawn = [tuple(vocabulary.resample(ids, 0.3, 8, random)) for _ in range(300)]
    assert vocabulary.decode(drawn) == [text] * 300
    assert 2 <= len(set(drawn)) <= 8
    assert Counter(drawn).most_common(1)[0][0] == tuple(ids)
    peaked = [tuple(vocabulary.resample(ids, 200.0, 8, random)) for _ in range(20)]
    assert set(peaked) == {tuple(ids)}


def test_text_with_unknown_characters_keeps_its_segmentation(vocabulary: Vocabulary) -> None:
    ids = np.array(vocabulary.encode(["zwei 漢字"])[0])
    assert UNKNOWN in ids
    assert vocabulary.resample(ids, 0.1, 8, np.random.default_rng(1)) == list(ids)


def test_more_pieces_than_the_corpus_can_fill_are_refused_with_the_most_possible(make: Make) -> None:
    with pytest.raises(UserError, match=r"corpus.vocabulary.size: 50000 pieces are more .* set it to \d+ or less"):
        train(make(corpus__vocabulary={"size": 50000}).corpus)


def test_fewer_pieces_than_characters_are_refused(make: Make) -> None:
    with pytest.raises(UserError, match="corpus.vocabulary.size: 16 pieces are fewer than the characters"):
        train(make(corpus__vocabulary={"size": 16}).corpus)


def test_bpe_is_trained_on_request(make: Make) -> None:
    bpe = train(make(corpus__vocabulary={"size": 150, "type": "bpe"}).corpus)
    assert len(bpe) == 150
    assert bpe.decode(bpe.encode(["drei Kisten"])) == ["drei Kisten"]


def test_only_unigram_models_can_resample(make: Make, vocabulary: Vocabulary) -> None:
    assert vocabulary.can_resample()
    assert not train(make(corpus__vocabulary={"size": 150, "type": "bpe"}).corpus).can_resample()


def test_a_bpe_model_that_is_given_cannot_be_sampled_from(make: Make, tmp_path: Path) -> None:
    (tmp_path / "bpe.model").write_bytes(train(make(corpus__vocabulary={"size": 120, "type": "bpe"}).corpus).model)
    config = make(corpus__vocabulary={"path": str(tmp_path / "bpe.model"), "sampling": 0.1})
    with pytest.raises(UserError, match=r"corpus.vocabulary.sampling: needs one SentencePiece model of type unigram"):
        start(config, False, False)


def test_long_lines_are_trained_on_too(make: Make, tmp_path: Path) -> None:
    for side in ("en", "de"):
        (tmp_path / side).write_text("\n".join(["aé bc defghijklmnop " * 500, "ü" * 5000]) + "\n", encoding="utf-8")
    files = [str(tmp_path / side) for side in ("en", "de")]
    trained = train(make(corpus__train=files, corpus__vocabulary={"size": 24}).corpus)
    assert UNKNOWN not in trained.encode(["aé bc ü"])[0]


def test_long_lines_are_trained_on_in_parts(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SentencePiece takes a time that grows with the square of a line's length."""
    lines = ["ab " * 2000, "c" * 9000, "d"]
    for side in ("en", "de"):
        (tmp_path / side).write_text("\n".join(lines) + "\n", encoding="utf-8")
    seen: list[str] = []

    def note(**options: Any) -> None:
        seen.extend(options["sentence_iterator"])
        raise RuntimeError("sentences_.empty()")

    monkeypatch.setattr(sentencepiece.SentencePieceTrainer, "train", note)
    with pytest.raises(UserError):
        train(make(corpus__train=[str(tmp_path / side) for side in ("en", "de")]).corpus)
    assert max(map(len, seen)) <= 4000
    assert "".join(seen) == "".join(line * 2 for line in lines)


def test_files_that_are_no_vocabulary_of_ours_are_named(tmp_path: Path, vocabulary: Vocabulary) -> None:
    path = tmp_path / "v.model"
    with pytest.raises(UserError, match=r"v\.model: No such file"):
        Vocabulary.load(path)
    for damaged in (b"no model", b"", vocabulary.model[:500]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"v\.model"):
            Vocabulary.load(path)


SAMPLED = """
import hashlib, sys
from nmt_train.corpus import CorpusConfig
from nmt_train.corpus.vocabulary_config import VocabularyConfig
from nmt_train.corpus import survey
from nmt_train.corpus.train_vocabulary import train
survey.SAMPLE_LINES = 300
corpus = CorpusConfig(train=sys.argv[1:], valid=["a", "b"], vocabulary=VocabularyConfig(size=100))
print(hashlib.sha256(train(corpus).model).hexdigest())
"""


@pytest.mark.slow
def test_a_vocabulary_of_a_sample_of_the_corpus_is_the_same_in_every_process(demo: Path) -> None:
    command = [sys.executable, "-c", SAMPLED, f"{demo}/train.en", f"{demo}/train.de"]
    digests = {subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)}
    assert len(digests) == 1


PLACEHOLDERS = ["<name>", "{0}"]


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_user_defined_pieces_survive_everywhere_in_a_text(make: Make, kind: str) -> None:
    own = train(make(corpus__vocabulary={"size": 140, "type": kind, "user_defined": PLACEHOLDERS}).corpus)
    for text in ("<name>", "zwei <name> Kisten", "drei{0}Kisten <name>, {0}{0}", "The book <name>"):
        ids = own.encode([text])[0]
        assert own.decode([ids]) == [text]
        assert sum(own.piece(number) in PLACEHOLDERS for number in ids) == text.count("<name>") + text.count("{0}")
        if own.can_resample():
            random = np.random.default_rng(1)
            drawn = [own.resample(np.array(ids), 0.1, 16, random) for _ in range(20)]
            assert all(any(own.piece(number) in PLACEHOLDERS for number in its) for its in drawn)
            assert own.decode(drawn) == [text] * 20


@pytest.mark.parametrize("kind", ["char", "word"])
def test_a_vocabulary_of_characters_or_words_has_at_most_its_size(make: Make, demo: Path, kind: str) -> None:
    lines = (demo / "train.de").read_text(encoding="utf-8").split("\n")[:50]
    whole, few = (train(make(corpus__vocabulary={"size": size, "type": kind}).corpus) for size in (20_000, 20))
    assert whole.decode(whole.encode(lines)) == lines
    assert 20 < len(whole) < 20_000
    assert len(few) == 20
    assert not whole.can_resample()
    pieces = [whole.piece(number) for number in range(4, len(whole))]
    assert all(len(piece) == 1 for piece in pieces) if kind == "char" else all(piece[0] == "▁" for piece in pieces)


def test_words_remain_as_they_are(make: Make, tmp_path: Path) -> None:
    """Text that another program has cut into pieces comes back as it was: no character is normalized."""
    lines = ["w@@ ord s@@ ½ ﬁ Ⅳ &apos;s ａ", "ein@@ und@@ zwanzig － ok"]
    for side in ("en", "de"):
        (tmp_path / side).write_text("\n".join(lines) + "\n", encoding="utf-8")
    files = [str(tmp_path / side) for side in ("en", "de")]
    words = train(make(corpus__train=files, corpus__vocabulary={"size": 100, "type": "word"}).corpus)
    ids = words.encode(lines)
    assert [[words.piece(i)[1:] for i in line] for line in ids] == [line.split() for line in lines]
    assert words.decode(ids) == lines
    assert UNKNOWN in words.encode(["new"])[0]


def test_pieces_that_sentencepiece_wrote_cannot_be_words(make: Make, tmp_path: Path) -> None:
    for side in ("en", "de"):
        (tmp_path / side).write_text("▁wa ter ▁mel on\n", encoding="utf-8")
    config = make(corpus__train=[str(tmp_path / side) for side in ("en", "de")], corpus__vocabulary={"type": "word"})
    with pytest.raises(UserError, match="corpus.vocabulary.type: word would not leave the character ▁ of this corpus alone"):
        train(config.corpus)


@pytest.mark.parametrize("kind", ["unigram", "bpe", "char", "word"])
def test_tags_and_user_defined_pieces_are_never_split(make: Make, demo: Path, kind: str) -> None:
    part = {"files": [f"{demo}/train.en", f"{demo}/train.de"], "tag": "<2de>"}
    vocabulary = {"size": 140, "type": kind, "user_defined": ["<name>"]}
    found = train(make(corpus__train=[part], corpus__vocabulary=vocabulary).corpus)
    for symbol in ("<2de>", "<name>"):
        assert found.knows(symbol)
        assert symbol in [found.piece(i).removeprefix("▁") for i in found.encode([f"six {symbol} seven"])[0]]
    assert found.decode(found.encode(["<2de> six <name>"])) == ["<2de> six <name>"]


def test_user_defined_pieces_must_be_words_and_in_the_vocabulary_of_the_run(make: Make, tmp_path: Path) -> None:
    for wrong in ("two words", "", "</s>"):
        with pytest.raises(UserError, match=r"corpus.vocabulary: user_defined .* cannot be one piece; write a word"):
            make(corpus__vocabulary={"user_defined": [wrong]})
    (tmp_path / "own.model").write_bytes(train(make().corpus).model)
    config = make(corpus__vocabulary={"path": str(tmp_path / "own.model"), "user_defined": ["<name>"]})
    with pytest.raises(UserError, match="corpus.vocabulary.user_defined: <name> is no user-defined piece of this run's"):
        start(config, False, False)


def test_unknown_pieces_are_named_and_can_be_put_back(vocabulary: Vocabulary) -> None:
    text = "zwei 漢字 und 語"
    assert vocabulary.unknown([text, "zwei"]) == [["漢字", "語"], []]
    ids = vocabulary.encode([text])[0]
    assert vocabulary.decode_with(ids, ["漢字", "語"]) == text
    assert ids.count(UNKNOWN) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["char", "word"])
def test_a_run_with_characters_or_words_continues(make: Make, kind: str) -> None:
    for after in ("3u", "6u"):
        config = make(corpus__vocabulary={"size": 5000, "type": kind}, corpus__max_length=200, stop__after=after)
        assert start(config, False, False) == 0
