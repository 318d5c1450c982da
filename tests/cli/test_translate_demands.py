"""nmt-translate with prefixes, terms, samples and copies of unknown characters."""

from __future__ import annotations

import io
import os
import random
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Once, small

from nmt_train import cli, config
from nmt_train.cli import translate
from nmt_train.corpus.text import Lines
from nmt_train.corpus.train_vocabulary import train
from nmt_train.load_model import load_model
from nmt_train.model.beam_search import SearchConfig
from nmt_train.model.request import Requests
from nmt_train.model.translator import Translator
from nmt_train.training.start import start

RARE = [chr(number) for number in range(0x4E00, 0x4E00 + 100)]  # characters that the vocabulary lacks


@pytest.fixture(scope="module")
def run(demo: Path, once: Once) -> Path:
    """A run whose corpus has a placeholder or an unknown character at the end of many pairs."""
    return once("demanding", lambda folder: demanding(demo, folder)) / "run"


def demanding(demo: Path, folder: Path) -> None:
    values = small(demo, folder / "run")
    values["corpus"]["vocabulary"] = {"size": 120, "user_defined": ["<name>"]}
    (folder / "known.model").write_bytes(train(config.validate(values, {}).corpus).model)
    values["corpus"]["vocabulary"] = {"path": str(folder / "known.model"), "user_defined": ["<name>"]}
    chance = random.Random(1)
    endings = [chance.choice(["", " <name>", f" {chance.choice(RARE)}"]) for _ in range(600)]
    for language in ("en", "de"):
        lines = (demo / f"train.{language}").read_text(encoding="utf-8").splitlines()
        text = "".join(f"{line}{ending}\n" for line, ending in zip(lines, endings, strict=True))
        (folder / f"train.{language}").write_text(text, encoding="utf-8")
    values["corpus"]["train"] = [f"{folder}/train.en", f"{folder}/train.de"]
    values |= {"stop": {"after": "240u"}, "optimizer": {"learning_rate": 0.005, "warmup": 50}}
    values["model"] |= {"dim": 64, "ffn_dim": 128}
    assert start(config.validate(values, {}), False, False) == 0


@pytest.fixture
def translated(run: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: Any) -> Any:
    def call(text: str, *arguments: object) -> tuple[int, list[str], str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        capfdbinary.readouterr()
        status = cli.run(translate.command, ["--model", str(run), *map(str, arguments)])
        out, err = (stream.decode() for stream in capfdbinary.readouterr())
        return status, out.split("\n")[:-1], err

    return call


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def write(*lines: str) -> Path:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.txt"
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return path

    return write


LINES = "six apples\nThe book of Monday\n\nWe buy sugar\n"


# --- prefixes


@pytest.mark.parametrize("options", [[], ["--beam", 1], ["--sample", "top-k=5"]])
def test_a_translation_begins_with_its_prefix(translated: Any, written: Any, options: list[object]) -> None:
    prefixes = written("Sie", "", "Das", "Wir  kauﬀen 語 ")
    free = translated(LINES, *options)[1]
    status, lines, said = translated(LINES, "--prefix", prefixes, *options)
    assert status == 0
    assert lines[0].startswith("Sie")
    assert lines[1] == free[1]
    assert lines[2] == "", "an empty line has an empty translation"
    assert re.match("Wir  kauﬀen 語( |$)", lines[3]), "exactly as given, and no letter follows a space"
    assert "without a term" not in said


def test_all_n_best_translations_of_an_ensemble_begin_with_the_prefix(translated: Any, written: Any, run: Path) -> None:
    also = run / "last"  # a second model for --model
    rows = [
        row.split(" ||| ")[:2] for row in translated(LINES, also, "--n-best", 3, "--prefix", written("Sie", "", "", "Wir"))[1]
    ]
    for line, prefix in (("0", "Sie"), ("3", "Wir")):
        begins = [text.split()[0] for number, text in rows if number == line]
        assert 1 < len(begins) <= 3
        assert set(begins) == {prefix}


@pytest.mark.parametrize("option", ["--prefix", "--terms"])
def test_files_of_another_length_are_refused_after_the_lines_that_they_have(translated: Any, written: Any, option: str) -> None:
    status, lines, said = translated(LINES, option, short := written("", ""))
    assert (status, lines) == (2, translated(LINES)[1][:2])
    assert f"{short}: ends after line 2, but the input has more lines; give one line per line of input" in said
    status, lines, said = translated(LINES, option, long := written(*[""] * 6))
    assert (status, len(lines)) == (2, 4)
    assert f"{long}, line 5: the input ends after line 4; give one line per line of input" in said


def test_a_missing_file_of_prefixes_is_named(translated: Any, tmp_path: Path) -> None:
    status, lines, said = translated(LINES, "--prefix", tmp_path / "none.txt")
    assert (status, lines) == (2, [])
    assert "none.txt" in said


def test_prefixes_are_read_in_step_with_a_stream_of_lines(run: Path, tmp_path: Path) -> None:
    model, vocabulary, _ = load_model([run / "last"], torch.device("cpu"))
    os.mkfifo(pipe := tmp_path / "pipe")
    answered = threading.Event()

    def prefixes() -> None:
        with open(pipe, "w", encoding="utf-8") as file:
            print("Sie", file=file, flush=True)
            assert answered.wait(60), "the first line is not translated before the second prefix is known"
            print("Wir", file=file, flush=True)

    writer = threading.Thread(target=prefixes)
    writer.start()
    requests = Requests(Lines(io.BytesIO(b"six\nseven\n"), "input", "stop"), vocabulary, prefixes=pipe)
    stream = Translator(model, vocabulary, SearchConfig(beam=1)).stream(requests, pause=0.01)
    assert next(stream)[0][0].startswith("Sie")
    answered.set()
    assert next(stream)[0][0].startswith("Wir")
    assert next(stream, None) is None
    writer.join()
    assert requests.error is None


def test_pieces_are_those_of_the_text(translated: Any, written: Any) -> None:
    text, options = "six apples 漢\n\nWe buy sugar\n", ["--unknown", "copy", "--prefix", written("Sie 語", "", "")]
    whole, pieces = translated(text, *options)[1], translated(text, *options, "--pieces")[1]
    assert ["".join(line.split(" ")).replace("▁", " ").strip() for line in pieces] == whole
    assert all(len(line.split(" ")) > len(text.split(" ")) for line, text in zip(pieces, whole, strict=True) if text)


# --- terms


@pytest.mark.parametrize("options", [[], ["--beam", 1], ["--n-best", 2], ["--prefix"]])
def test_translations_contain_their_terms_as_whole_words(translated: Any, written: Any, options: list[object]) -> None:
    terms = written("Brot", "", "Brot", "Honig\tam Montag\tHonig\t")
    if options == ["--prefix"]:
        options = ["--prefix", written("Wir", "", "", "Wir")]
    free = translated(LINES)[1]
    status, lines, said = translated(LINES, "--terms", terms, *options)
    assert (status, "warning: 1 line is translated without a term (line 3)" in said) == (0, True)
    if "--n-best" in options:
        rows = [line.split(" ||| ")[:2] for line in lines]
        assert all(re.search(r"\bBrot\b", text) for number, text in rows if number == "0")
        lines = [dict(reversed(rows))[str(number)] for number in range(4)]
    assert re.search(r"\bBrot\b", lines[0])
    assert lines[2] == ""
    assert re.search(r"\bHonig\b", lines[3])
    assert re.search(r"\bam Montag\b", lines[3])
    if "--beam" not in options:
        assert lines[1] == free[1]


def test_a_term_with_an_unknown_character_is_refused_after_the_lines_before_it(translated: Any, written: Any) -> None:
    status, lines, said = translated(LINES, "--terms", (path := written("", "", "Brot\tein 語", "")))
    assert (status, len(lines)) == (2, 2)
    assert f"{path}, line 3: the vocabulary lacks 語 of the term ein 語; spell it without, or remove it" in said


# --- samples


def test_samples_are_the_same_for_the_same_seed_whatever_the_batches(translated: Any) -> None:
    options = ["--sample", "nucleus=0.95", "--n-best", 2]
    found = translated(LINES, *options)
    assert found[0] == 0
    assert {line.split(" |||")[0] for line in found[1]} == {"0", "1", "2", "3"}
    for others in (["--batch-tokens", 5], ["--window", 1], ["--seed", 1]):
        lines = translated(LINES, *options, *others)[1]
        assert [line.split(" ||| ")[1] for line in lines] == [line.split(" ||| ")[1] for line in found[1]]
    assert translated(LINES, *options, "--seed", 2)[1] != found[1]


def test_samples_are_a_diverse_list_in_which_no_translation_is_twice(translated: Any) -> None:
    drawn, searched = (
        [tuple(row.split(" ||| ")[:2]) for row in translated(LINES, "--n-best", 8, *options)[1]]
        for options in (["--sample", "top-k=10"], ["--beam", 8])
    )
    for rows in (drawn, searched):
        assert len(set(rows)) == len(rows)
        assert [text for number, text in rows if number == "2"] == [""]
    for line in ("0", "1", "3"):
        words, others = (
            {word for number, text in rows if number == line for word in text.split()} for rows in (drawn, searched)
        )
        assert len(words) > len(others)
    only = [row.split(" |||")[0] for row in translated(LINES, "--n-best", 8, "--sample", "top-k=1")[1]]
    assert only == ["0", "1", "2", "3"], "all samples are the same"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--sample", "top-k=5", "--beam", "4"], "--sample draws translations and has no beam; leave out --beam"),
        (["--sample", "top-k=5", "--terms", "x"], "--terms needs beam search; leave out --sample"),
        (["--sample", "top-k"], "write top-k=10 or nucleus=0.9"),
        (["--sample", "nucleus=2"], "write top-k=10 or nucleus=0.9"),
        (["--sample", "best"], "write top-k=10 or nucleus=0.9"),
        (["--n-best", "9"], "--n-best 9 needs a --beam of at least as many, not 5"),
        (["--max-length-factor", "-1"], "-1 is not between 0 and 100"),
    ],
)
def test_options_that_do_not_fit_are_refused(translated: Any, options: list[str], sentence: str) -> None:
    status, lines, said = translated(LINES, *options)
    assert (status, lines) == (2, [])
    assert sentence in said


def test_a_translation_is_no_longer_than_the_factor_allows(translated: Any) -> None:
    numbers = "nine hundred and ninety-nine thousand nine hundred and ninety-nine\n"
    assert len(translated(numbers, "--max-length-factor", 0)[1][0]) < len(translated(numbers)[1][0])


# --- placeholders and unknown characters


@pytest.mark.slow
def test_placeholders_survive_translation(translated: Any) -> None:
    lines = translated("six apples <name>\nThe book <name>\nWe buy sugar <name>\n")[1]
    assert all(line.endswith(" <name>") for line in lines)


@pytest.mark.slow
def test_unknown_characters_are_copied_if_wanted(translated: Any, run: Path) -> None:
    text = "six apples 漢\nWe buy sugar 語\nseven apples\n"
    avoided, copied = translated(text)[1], translated(text, "--unknown", "copy")[1]
    assert not any(character in line for line in avoided for character in "漢語⁇")
    assert copied[0].endswith(" 漢")
    assert copied[1].endswith(" 語"), "also one that the corpus does not have"
    assert copied[2] == avoided[2]


def test_the_log_of_a_new_run_names_the_unknown_characters(run: Path) -> None:
    log = (run / "train.log").read_text(encoding="utf-8")
    (line,) = [line for line in log.splitlines() if "that the vocabulary lacks" in line]
    counts = dict(re.findall(r"(\S) \((\d+)\)", line))
    assert len(counts) == 20
    assert " other" in line
    text = (run.parent / "train.en").read_text(encoding="utf-8") + (run.parent / "train.de").read_text(encoding="utf-8")
    for character, count in counts.items():
        assert int(count) == sum(character in line for line in text.splitlines())
    assert "character_coverage" in line
