"""What a pass over text counts: exactly, whatever its size; and the scripts of lines."""

from __future__ import annotations

import random

import pytest

from nmt_train.check.inspection import Digests, Inspection, in_other_script, script, scripts


def test_empty_copied_repeated_and_leaked_pairs_are_counted() -> None:
    pairs = [("one", "eins"), ("two", "zwei"), ("one", "eins"), (" ", "drei"), ("four", ""), ("OK", "OK"), ("one", "ein")]
    found = Inspection(frozenset({hash(("two", "zwei")), hash(("nine", "neun"))}))
    for pair in pairs:
        found.add(pair)
    assert (found.pairs, found.empty, found.copies) == (7, 2, 1)
    assert found.repeated == pytest.approx(1 / 5)
    assert found.leaked == {hash(("two", "zwei"))}
    assert found.sample == pairs


def test_the_share_of_repeated_texts_is_the_same_in_bounded_memory() -> None:
    chance = random.Random(1)
    texts = [f"sentence {chance.randrange(30_000)}" for _ in range(40_000)]
    exact, bounded = Digests(), Digests(most=4_000)
    for text in texts:
        exact.add(hash(text))
        bounded.add(hash(text))
    assert exact.repeated == pytest.approx(1 - len(set(texts)) / len(texts))
    assert bounded.repeated == pytest.approx(exact.repeated, abs=0.05)
    assert Digests().repeated == 0.0


@pytest.mark.parametrize(
    ("letter", "name"), [("a", "Latin"), ("ß", "Latin"), ("ж", "Cyrillic"), ("λ", "Greek"), ("中", "Han"), ("あ", "Hiragana"),
                         ("ア", "Katakana"), ("한", "Hangul"), ("ع", "Arabic"), ("ａ", "Latin"), ("ª", "")],
)  # fmt: skip
def test_the_script_of_a_letter_is_known(letter: str, name: str) -> None:
    assert script(letter) == name


def test_scripts_are_counted_by_letters_the_most_common_first() -> None:
    assert scripts(["abc 1!", "дa"]) == {"Latin": 0.8, "Cyrillic": 0.2}
    assert scripts(["12", ""]) == {}


def test_lines_in_another_script_are_found_and_single_names_are_no_such_lines() -> None:
    lines = ["Привет, мир", "Это IBM и Windows сегодня вечером", "hello world", "123", "OK"]
    assert in_other_script(lines, "Cyrillic") == pytest.approx(1 / 3)


def test_japanese_is_one_language_with_several_scripts() -> None:
    assert in_other_script(["これはペンです", "東京都庁舎", "コンピューター"], "Hiragana") == 0.0
