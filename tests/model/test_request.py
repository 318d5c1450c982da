"""Lines with their demands, as the files of prefixes and terms give them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import sentencepiece

from nmt_train.corpus.text import Lines
from nmt_train.corpus.vocabulary import BEGIN, END, PAD, UNKNOWN, Vocabulary
from nmt_train.model.demand import NOTHING, continues_word
from nmt_train.model.request import Request, Requests


def requested(vocabulary: Vocabulary, tmp_path: Path, prefix: str = "", terms: str = "") -> Request:
    files = [tmp_path / "prefix", tmp_path / "terms"]
    for path, text in zip(files, (prefix, terms), strict=True):
        path.write_text(text + "\n", encoding="utf-8")
    requests = Requests(Lines(io.BytesIO(b"text\n"), "input", "stop"), vocabulary, *files)
    (found,) = requests
    assert requests.error is None
    return found


def test_a_line_without_prefix_and_terms_demands_nothing(vocabulary: Vocabulary, tmp_path: Path) -> None:
    assert requested(vocabulary, tmp_path, " ", "\t \t") == Request("text", "", NOTHING)


def test_a_prefix_ends_a_word_if_it_ends_with_a_space(vocabulary: Vocabulary, tmp_path: Path) -> None:
    open_, closed = (requested(vocabulary, tmp_path, text) for text in ("zwei Kist", " zwei Kisten "))
    assert (open_.prefix, open_.demand.word_ends) == ("zwei Kist", False)
    assert (closed.prefix, closed.demand.word_ends) == ("zwei Kisten", True)
    assert vocabulary.decode([open_.demand.prefix, closed.demand.prefix]) == ["zwei Kist", "zwei Kisten"]


def test_terms_are_separated_by_tabs_and_repeated_ones_count_once(vocabulary: Vocabulary, tmp_path: Path) -> None:
    terms = requested(vocabulary, tmp_path, terms="zwei Kisten\t Mehl \t\tzwei Kisten").demand.terms
    assert vocabulary.decode(terms) == ["zwei Kisten", "Mehl"]


@pytest.fixture(scope="module")
def chinese(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    output = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["他在东京工作", "东京很大", "我喜欢东京和北京", "北京很大"] * 20), model_writer=output,
        vocab_size=21, pad_id=PAD, unk_id=UNKNOWN, bos_id=BEGIN, eos_id=END, minloglevel=2,
    )  # fmt: skip
    return Vocabulary(output.getvalue(), "chinese")


def test_terms_of_a_script_without_spaces_may_be_anywhere(chinese: Vocabulary, tmp_path: Path) -> None:
    (term,) = requested(chinese, tmp_path, terms="东京").demand.terms
    pieces = [chinese.piece(number) for number in term]
    assert "".join(pieces) == "东京"
    assert not any(map(continues_word, pieces))


def test_letters_digits_and_marks_continue_a_word_and_nothing_else_does() -> None:
    assert all(map(continues_word, ["s", "hof", "ß", "7", "\u0301x", "д"]))
    assert not any(map(continues_word, ["\u2581s", "\u2581", ".", "-", "</s>", "<unk>", "京", "か", "ไ", ""]))
