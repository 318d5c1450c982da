"""nmt-translate and nmt-validate --score: what is said of lines that need it, and several models together."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import small

from nmt_train import cli, config
from nmt_train.cli import translate, validate
from nmt_train.corpus import text
from nmt_train.load_model import load_ensemble, load_model
from nmt_train.run.folder import Run
from nmt_train.training.start import start


@pytest.fixture
def run(trained: Path) -> Path:
    return trained


@pytest.fixture
def translated(monkeypatch: pytest.MonkeyPatch, capfdbinary: Any) -> Any:
    def call(text: bytes, *arguments: object) -> tuple[int, list[str], str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        capfdbinary.readouterr()
        status = cli.run(translate.command, [str(argument) for argument in arguments])
        out, err = (stream.decode() for stream in capfdbinary.readouterr())
        return status, out.split("\n")[:-1], err

    return call


BAD = b"six\nfour\nb\xffd\nseven\n"


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 2000])
def test_it_stops_at_a_bad_line_after_those_before_it(run: Path, translated: Any, window: int) -> None:
    status, lines, said = translated(BAD, "--model", run, "--window", window)
    good = translated(b"six\nfour\n", "--model", run)[1]
    assert (status, lines) == (2, good)
    assert "standard input, line 3: not UTF-8 (byte 2 of the line)" in said
    assert "translated before it: 2 lines; correct it and continue with tail -n +3, or use --on-error" in said


def test_a_bad_line_is_replaced_or_skipped_if_wanted_and_the_others_stay_as_they_are(run: Path, translated: Any) -> None:
    good = translated("six\nfour\nb�d\nseven\n".encode(), "--model", run)
    assert "UTF-8" not in good[2], "a replacement character in the text is no error"
    status, lines, said = translated(BAD, "--model", run, "--on-error", "replace")
    assert (status, lines) == (0, good[1])
    assert "warning: 1 line is not UTF-8: invalid bytes are replaced (line 3)" in said
    status, lines, said = translated(BAD, "--model", run, "--on-error", "skip")
    assert (status, lines) == (0, [*good[1][:2], "", good[1][3]])
    assert "the translation is empty (line 3)" in said


def test_a_line_without_end_is_no_matter_of_on_error(run: Path, translated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "LONGEST_LINE", 100)
    status, lines, said = translated(b"one\n" + b"x" * 200, "--model", run, "--on-error", "skip")
    assert (status, len(lines)) == (2, 1)
    assert "line 2: longer than 100 bytes" in said
    assert "--on-error" not in said


@pytest.mark.slow
def test_lines_that_were_cut_are_named(run: Path, translated: Any) -> None:
    long = b"six " * 2000
    status, lines, said = translated(b"\n".join([b"one", long, b"two", long, b""]), "--model", run, "--beam", 1, "--window", 3)
    assert (status, len(lines)) == (0, 4)
    assert "warning: 2 lines are longer than 1,000 pieces: cut (line 2, 4)" in said


def test_an_n_best_list_has_different_translations_and_one_if_the_line_is_empty(run: Path, translated: Any) -> None:
    lines = translated(b"six\n\nseven\n", "--model", run, "--n-best", 3, "--beam", 3)[1]
    rows = [tuple(line.split(" ||| ")[:2]) for line in lines]
    assert [number for number, _ in rows] == ["0"] * 3 + ["1"] + ["2"] * 3
    assert rows[3] == ("1", "")
    assert len(set(rows)) == len(rows)


@pytest.mark.slow
def test_an_ensemble_of_one_model_twice_is_that_model(run: Path, demo: Path, translated: Any) -> None:
    text = (demo / "test.en").read_bytes()
    assert translated(text, "--model", run)[1] == translated(text, "--model", run, run / "last")[1]


def test_a_closed_output_is_one_sentence(run: Path, translated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    status, _, said = translated(b"six\n", "--model", run)
    assert (status, said) == (2, "error: standard output is closed; say where the translations should go, as in nmt-translate"
                                 " --model RUN > FILE\n")  # fmt: skip


def test_with_closed_stderr_only_translations_are_printed(run: Path, translated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    status, lines, _ = translated(b"six\xff\nseven\n", "--model", run, "--on-error", "replace")
    assert (status, len(lines)) == (0, 2)
    monkeypatch.setattr(sys, "stderr", None)
    assert translated(b"six\n", "--model", run.parent / "none")[:2] == (2, [])


def test_an_ensemble_averages_probabilities(run: Path) -> None:
    paths = Run(run).checkpoints()
    models = [load_model([path], torch.device("cpu"))[0] for path in paths]
    together, vocabulary, _ = load_ensemble([[path] for path in paths], torch.device("cpu"))
    source, words = torch.tensor([vocabulary.encode(["six"])[0] + [3]]), torch.tensor([[2]])
    with torch.inference_mode():
        each = [model.step(words, model.start(source, None)).softmax(-1) for model in models]
        found = together.step(words, together.start(source, None))  # type: ignore[arg-type]
    torch.testing.assert_close(found.exp(), (each[0] + each[1]) / 2)
    assert not torch.allclose(each[0], each[1])


def test_the_models_of_an_ensemble_share_a_vocabulary(run: Path, demo: Path, tmp_path: Path, translated: Any) -> None:
    values = small(demo, tmp_path / "other")
    values["corpus"]["vocabulary"] = {"size": 110}
    assert start(config.validate(values, {}), False, False) == 0
    status, _, said = translated(b"six\n", "--model", run, tmp_path / "other")
    assert status == 2
    assert "has another vocabulary than" in said


def test_scores_are_the_log_probabilities_whose_mean_is_the_cross_entropy(
    run: Path, demo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    test = ["--test", str(demo / "test.en"), str(demo / "test.de")]
    assert cli.run(validate.command, [str(run), "--score", *test, "--batch-tokens", "100"]) == 0
    scores = [float(line) for line in capsys.readouterr().out.splitlines()]
    assert cli.run(validate.command, [str(run / "last"), *test, "--json", "--metrics", "cross-entropy"]) == 0
    row = json.loads(capsys.readouterr().out)
    _, vocabulary, _ = load_model([run / "last"], torch.device("cpu"))
    lines = (demo / "test.de").read_text(encoding="utf-8").splitlines()
    pieces = sum(len(ids) + 1 for ids in vocabulary.encode(lines))
    assert len(scores) == len(lines)
    assert -math.fsum(scores) / pieces == pytest.approx(row["cross-entropy"], abs=1e-4)
    assert cli.run(validate.command, [str(run), str(run / "last"), "--score"]) == 2
    assert "--score is for one model; there are 2" in capsys.readouterr().err


@pytest.mark.slow
def test_two_models_are_compared_by_resampling(run: Path, demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = Run(run).checkpoints()
    test = ["--test", str(demo / "valid.en"), str(demo / "valid.de"), "--beam", "1"]
    arguments = [str(first), str(second), *test, "--metrics", "chrf", "bleu", "--compare"]
    assert cli.run(validate.command, [*arguments, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["model"], row["metric"]) for row in rows] == [
        (str(first), "chrf"), (str(second), "chrf"), (str(first), "bleu"), (str(second), "bleu"),
    ]  # fmt: skip
    assert cli.run(validate.command, [str(first), str(second), *test, "--metrics", "chrf", "--json"]) == 0
    wanted = [json.loads(line)["chrf"] for line in capsys.readouterr().out.splitlines()]
    assert [row["score"] for row in rows[:2]] == pytest.approx(wanted)
    assert rows[0]["p"] is None
    assert rows[1]["p"] < 0.05, "an epoch of training is no chance"
    assert cli.run(validate.command, arguments) == 0
    assert "p against the first" in capsys.readouterr().out
    assert cli.run(validate.command, [str(run), *test, "--compare"]) == 2
    assert "--compare: give at least two models" in capsys.readouterr().err


def test_a_model_does_not_differ_from_itself(run: Path, demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = ["bleu", "chrf++", "ter", "exact-match"]
    arguments = [str(run), str(run / "last"), "--compare", "--json", "--beam", "1", "--metrics", *metrics]
    assert cli.run(validate.command, arguments) == 0
    assert [row["p"] for row in map(json.loads, capsys.readouterr().out.splitlines())] == [None, 1.0] * 4
