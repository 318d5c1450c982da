"""What is checked before the expensive work: every line, and the lengths of random pairs; the vocabulary is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from conftest import Make

from nmt_train.common.errors import UserError
from nmt_train.corpus import store, survey
from nmt_train.corpus.survey import Sample, Survey
from nmt_train.corpus.train_vocabulary import train
from nmt_train.corpus.vocabulary import UNKNOWN, Vocabulary
from nmt_train.training.prepared_run import opened


def sampled(most: int, largest: float, lengths: list[int]) -> list[int]:
    sample = Sample[int](most, largest)
    for number, length in enumerate(lengths):
        sample.add(number, length)
    return sample.items


def test_a_sample_keeps_everything_in_order_if_there_is_room() -> None:
    assert sampled(100, 1000.0, [10] * 100) == list(range(100))


def test_a_sample_is_bounded_in_items_and_characters_and_drawn_from_everywhere() -> None:
    few, short = sampled(1000, 1e9, [10] * 20_000), sampled(20_000, 10_000.0, [10] * 20_000)
    assert few == short == sorted(few)
    assert len(few) == 1000
    assert np.histogram(few, bins=10, range=(0, 20_000))[0].min() > 60


def test_one_item_stays_even_if_it_is_too_large() -> None:
    assert sampled(10, 5.0, [100]) == [0]


def corpus_of(folder: Path, source: bytes, target: bytes) -> list[str]:
    (folder / "a.en").write_bytes(source)
    (folder / "a.de").write_bytes(target)
    return [f"{folder}/a.en", f"{folder}/a.de"]


GOOD = b"one two\n" * 500
WRONG: dict[str, tuple[bytes, bytes, str]] = {
    "line counts": (GOOD, GOOD + b"x\n", r"a.en has 500 lines and .*a.de has 501"),
    "not UTF-8": (GOOD + b"x\n", GOOD + b"\xff\n", r"a.de, line 501: not UTF-8"),
    "an empty side": (GOOD, b"\n" * 500, "corpus.train: the target side is empty"),
    "too long": (
        b"w " * 150 + b"\n" + b"w " * 140 + b"\n" + b"w\n",
        b"w\n" * 3,
        r"66.7% .*up to 140 in 50%, 150 in 90%, .*words",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_in_the_text_are_found_before_a_vocabulary_is_trained(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    source, target, said = WRONG[name]
    monkeypatch.setattr(sentencepiece.SentencePieceTrainer, "train", lambda **options: pytest.fail("trained a vocabulary"))
    with pytest.raises(UserError, match=said), opened(make(corpus__train=corpus_of(tmp_path, source, target)), False, False):
        pass


def refuse_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "build_store", lambda *arguments: pytest.fail("tokenized the corpus"))


@pytest.mark.parametrize("name", WRONG)
def test_they_are_found_before_the_corpus_is_tokenized_too(
    make: Make, tmp_path: Path, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    source, target, said = WRONG[name]
    (tmp_path / "given.model").write_bytes(vocabulary.model)
    refuse_to_build(monkeypatch)
    config = make(corpus__train=corpus_of(tmp_path, source, target), corpus__vocabulary={"path": str(tmp_path / "given.model")})
    with pytest.raises(UserError, match=said.split(", 150")[0].replace("140", r"\d+")), opened(config, False, False):
        pass


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch__tokens": 50}, "batch.tokens: 50 cannot hold"),
        ({"corpus__vocabulary": {"size": 120, "type": "bpe"}, "sampled": True}, "corpus.vocabulary.sampling"),
        ({"corpus__valid": "long"}, "corpus.valid, line 1: longer than 4,000 pieces"),
    ],
)
def test_mistakes_in_the_settings_are_found_before_the_corpus_is_tokenized(
    make: Make, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], said: str
) -> None:
    if changes.get("corpus__valid"):
        changes = {"corpus__valid": corpus_of(tmp_path, b"one " * 5000 + b"\n", b"x\n")}
    if changes.pop("sampled", False):
        (tmp_path / "bpe.model").write_bytes(train(make(**changes).corpus).model)
        changes = {"corpus__vocabulary": {"path": str(tmp_path / "bpe.model"), "sampling": 0.1}}
    refuse_to_build(monkeypatch)
    with pytest.raises(UserError, match=said), opened(make(**changes), False, False):
        pass


def test_the_share_of_over_long_pairs_is_estimated_from_random_pairs_and_only_a_sure_excess_is_refused(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey, "_PAIRS", 400)
    for long, refused in ((210, False), (500, True)):
        lines = [b"w " * 200 if number < long else b"w" for number in range(1000)]
        files = corpus_of(tmp_path, b"\n".join(lines) + b"\n", b"w\n" * 1000)
        found = Survey(make(corpus__train=files).corpus)
        if refused:
            with pytest.raises(UserError, match=r"of 400 pairs drawn at random"):
                found.check_lengths(lambda lines, side: [len(line.split()) for line in lines])
        else:
            found.check_lengths(lambda lines, side: [len(line.split()) for line in lines])


def test_a_vocabulary_is_trained_once_for_the_same_text_even_if_a_later_check_fails(
    make: Make, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[int] = []
    original = sentencepiece.SentencePieceTrainer.train

    def count(**options: Any) -> None:
        trained.append(1)
        original(**options)

    monkeypatch.setattr(sentencepiece.SentencePieceTrainer, "train", count)
    lines = {side: (demo / f"train.{side}").read_bytes() for side in ("en", "de")}
    files, cache = corpus_of(tmp_path, lines["en"], lines["de"]), str(tmp_path / "cache")
    with (
        pytest.raises(UserError, match="would be left out"),
        opened(make(corpus__train=files, corpus__cache=cache, corpus__max_length=20), False, False),
    ):
        pass
    assert len(trained) == 1
    with opened(make(corpus__train=files, corpus__cache=cache), False, False) as ready:
        first = ready.vocabulary.digest
    with opened(make(corpus__train=files, corpus__cache=cache), False, True) as ready:
        assert ready.vocabulary.digest == first
    assert len(trained) == 1
    corpus_of(tmp_path, lines["en"] * 2, lines["de"] * 2)
    with opened(make(corpus__train=files, corpus__cache=cache), False, False):
        pass
    assert len(trained) == 2


def test_lines_with_a_character_that_sentencepiece_reserves_are_trained_on_too(make: Make, demo: Path, tmp_path: Path) -> None:
    for language in ("en", "de"):
        lines = (demo / f"train.{language}").read_text(encoding="utf-8").splitlines()
        lines[::5] = [f"{line} ж \u2585" for line in lines[::5]]
        (tmp_path / language).write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = train(make(corpus__train=[f"{tmp_path}/en", f"{tmp_path}/de"]).corpus)
    assert UNKNOWN not in found.encode(["ж"])[0]
