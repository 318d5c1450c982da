"""Several validation sets by name, scores of a command of the user, and early stopping on any of them."""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Make, small
from simulated import events

from nmt_train.cli import plot, validate
from nmt_train.common.errors import UserError
from nmt_train.config import Config, load
from nmt_train.load_model import load_ensemble
from nmt_train.model.beam_search import SearchConfig
from nmt_train.model.external_score import CommandFailed, Stopped, external_score
from nmt_train.model.translator import Translator
from nmt_train.run.stopping import Patience, StopConfig
from nmt_train.training.start import start


def two(demo: Path, **second: Any) -> list[dict[str, Any]]:
    """The validation set of the demo corpus, and its test set as a second one."""
    return [
        {"name": "usual", "files": [f"{demo}/valid.en", f"{demo}/valid.de"]},
        {"name": "other", "files": [f"{demo}/test.en", f"{demo}/test.de"], **second},
    ]


def trained(make: Make, folder: Path, **changes: Any) -> Config:
    values = {"stop__after": "4u", "validation__every": "2u", "validation__beam": 1, **changes}
    config = dataclasses.replace(make(**values), run=str(folder))
    assert start(config, False, False) == 0
    return config


def test_every_set_has_its_metrics_its_best_checkpoint_its_translations_and_its_curve(
    make: Make, demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    trained(make, run, corpus__valid=two(demo, metrics="chrf"), validation__metrics=["cross-entropy"])
    found = events(run, "validation")[-1]
    assert {"cross-entropy", "chrf@other"} < found.keys()
    assert not {"chrf", "cross-entropy@other"} & found.keys()
    assert list(found["signatures"]) == ["chrf@other"]
    assert (run / "best-chrf@other").exists()
    assert len((run / "translations" / "4@other.txt").read_text(encoding="utf-8").splitlines()) == 20
    assert plot.command(["convergence", str(run), "--metric", "chrf@other"]) == 0
    assert "chrf@other" in (run / "convergence-chrf@other.csv").read_text(encoding="utf-8").splitlines()[0]
    assert "[valid] Ep. 1 : Up. 4 : chrf@other :" in (run / "train.log").read_text(encoding="utf-8")
    capsys.readouterr()
    assert validate.command([str(run / "last"), "--metrics", "cross-entropy"]) == 0
    assert f"{found['cross-entropy']:.4f}" in capsys.readouterr().out, "nmt-validate measures the first set"


def test_the_second_set_does_not_change_the_scores_of_the_first(make: Make, demo: Path, tmp_path: Path) -> None:
    trained(make, tmp_path / "one")
    trained(make, tmp_path / "two", corpus__valid=two(demo))
    scores = [[event["cross-entropy"] for event in events(tmp_path / name, "validation")] for name in ("one", "two")]
    assert scores[0] == scores[1]


def test_early_stopping_on_a_metric_by_name() -> None:
    judge = Patience(StopConfig(after=["9e"], patience=2, patience_on=["bleu@news"]))  # type: ignore[list-item]
    for value in (1.0, 0.5, 0.5):
        assert judge.reason is None
        judge.record({"cross-entropy": 9.0 - value, "bleu@news": value})
    assert judge.reason == "no new best in 2 validations (stop.patience)"


def test_a_metric_that_failed_once_keeps_its_best_value() -> None:
    judge = Patience(StopConfig(after=["9e"]))  # type: ignore[list-item]
    judge.record({"bleu": 1.0, "command": 0.8})
    assert "command" not in judge.record({"bleu": 2.0}, failed=["command"])
    assert judge.record({"bleu": 2.0, "command": 0.7})["command"].best == 0.8


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"stop__patience_on": "blue"}, r"stop.patience_on should be any, all, or some of cross-entropy, .*not 'blue'"),
        ({"stop__patience_on": ["any", "bleu"]}, "not 'any'"),
        ({"corpus__valid": [{"files": ["a", "b"]}, {"files": ["a", "b"]}]}, "a different name for every set after the first"),
        ({"corpus__valid": [{"files": ["a", "b"], "name": "a/b"}]}, "name 'a/b' becomes part of file names"),
        ({"corpus__valid": [{"files": ["a", "b"], "tag": "to de"}]}, "tag 'to de' cannot be one piece"),
        ({"corpus__valid": [{"files": ["a", "b"], "metrics": ["blue"]}]}, "should be cross-entropy, .*, not 'blue'"),
        ({"validation__command_limit": "5u"}, "command_limit 5u is not a time"),
    ],
)
def test_what_contradicts_itself_is_refused(make: Make, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        make(**changes)


def test_a_command_from_the_command_line_is_not_yaml(demo: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.yml"
    path.write_text(json.dumps(small(demo, tmp_path / "run")), encoding="utf-8")
    loaded = load([str(path)], {"validation.command": "echo score: 0.5", "validation.every": "1e"})
    assert loaded.validation.command == "echo score: 0.5"


LENGTH = f"{sys.executable} -c \"import sys; print('some text'); print(len(open(sys.argv[1]).read().split()))\" "


def test_the_score_of_a_command_is_a_metric(make: Make, demo: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(make, run, validation__metrics=["cross-entropy"], validation__command=LENGTH + "{reference}")
    words = len((demo / "valid.de").read_text(encoding="utf-8").split())
    assert [event["command"] for event in events(run, "validation")] == [words, words]
    assert (run / "best-command").exists()


def test_a_command_that_fails_is_reported_and_training_goes_on(make: Make, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(make, run, validation__command="echo no model; exit 3")
    assert all("command" not in event for event in events(run, "validation"))
    said = (run / "train.log").read_text(encoding="utf-8")
    assert "warning: command was not measured at update 2: validation.command: exit status 3: no model" in said


@pytest.mark.parametrize(
    ("command", "limit", "said"),
    [
        ("echo 0.5; echo none", 60.0, "the last line of its output is not a finite number: 'none'"),
        ("true", 60.0, "not a finite number: ''"),
        ("echo nan", 60.0, "not a finite number: 'nan'"),
        ("echo 0.5; echo wrong >&2; exit 2", 60.0, "exit status 2: wrong"),
        ("sleep 600 & sleep 600", 0.0, "not finished after 0 s"),
    ],
)
def test_why_a_command_gave_no_score(command: str, limit: float, said: str) -> None:
    with pytest.raises(CommandFailed, match=said):
        external_score(command, {}, limit, lambda: False)


def test_a_signal_stops_the_command() -> None:
    with pytest.raises(Stopped):
        external_score("sleep 600", {}, 1000.0, lambda: True)


def test_a_command_reads_the_sentences_line_by_line() -> None:
    texts = {"source": ["a b", "c"], "translations": ["d", ""]}
    count = "cat {source} {translations} | wc -l; echo progress >&2"
    assert external_score(count, texts, 60.0, lambda: False) == 4


def tagged(demo: Path, *tags: str) -> list[dict[str, Any]]:
    return [{"files": [f"{demo}/train.en", f"{demo}/train.de"], "tag": tag} for tag in tags]


@pytest.mark.slow
def test_a_tag_stands_before_every_source_of_a_validation_set_as_in_training(
    make: Make, demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tagged.en").write_text(
        "".join(f"<2de> {line}" for line in (demo / "valid.en").read_text(encoding="utf-8").splitlines(True)), encoding="utf-8"
    )
    sets = [
        {"files": [f"{demo}/valid.en", f"{demo}/valid.de"], "tag": "<2de>"},
        {"files": [f"{tmp_path}/tagged.en", f"{demo}/valid.de"], "name": "text"},
    ]
    run = tmp_path / "run"
    trained(make, run, corpus__train=tagged(demo, "<2de>"), corpus__valid=sets, validation__metrics=["cross-entropy", "bleu"])
    found = events(run, "validation")[-1]
    assert found["cross-entropy"] == pytest.approx(found["cross-entropy@text"], abs=1e-9)
    capsys.readouterr()
    assert validate.command([str(run / "last"), "--metrics", "cross-entropy"]) == 0
    assert f"{found['cross-entropy']:.4f}" in capsys.readouterr().out, "nmt-validate uses the tag of the set, too"
    test = ["--test", f"{tmp_path}/tagged.en", f"{demo}/valid.de", "--metrics", "cross-entropy"]
    assert validate.command([str(run / "last"), *test]) == 0
    assert f"{found['cross-entropy']:.4f}" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"--test, line 1: has no tag, but all sources .*; begin each source with <2de>"):
        validate.command([str(run / "last"), "--test", f"{demo}/valid.en", f"{demo}/valid.de"])
    model, vocabulary, tags = load_ensemble([[run / "last"]], torch.device("cpu"))
    translator = Translator(model, vocabulary, SearchConfig(beam=1), tags=tags)
    list(translator.stream(["<2de> six", "six", "", "<2nl> six"]))
    assert (tags, translator.untagged) == (("<2de>",), [2, 4])


@pytest.mark.parametrize(
    ("tags", "valid", "said"),
    [
        (["<2de>", "<2nl>"], {}, r"corpus.valid, line 1: has no tag, but all .*tag: '<2de>'}, or begin each"),
        (["<2de>", "<2nl>"], {"tag": "<2fr>"}, "corpus.valid: no training corpus has the tag <2fr>; choose <2de> or <2nl>"),
        (["<2de>", ""], {}, ""),
        ([""], {"tag": "twenty"}, ""),
    ],
)
def test_a_forgotten_tag_of_a_validation_set_is_refused(
    make: Make, demo: Path, tags: list[str], valid: dict[str, Any], said: str
) -> None:
    files = [f"{demo}/valid.en", f"{demo}/valid.de"]
    config = make(corpus__train=tagged(demo, *tags), corpus__valid=[{"files": files, **valid}], stop__after="1u")
    if said:
        with pytest.raises(UserError, match=said):
            start(config, False, False)
    else:
        assert start(config, False, False) == 0


LANGUAGES = {
    "en": "the house stands near a river and we often walk there with our children when it rains only little".split(),
    "de": "das Haus steht nahe am Fluss und wir gehen oft dort mit unseren Kindern spazieren wenn es nur wenig regnet".split(),
}


def said_to_be_exchanged(make: Make, run: Path, train: list[Any], valid: dict[str, Any]) -> bool:
    changes = {"corpus__train": train, "corpus__valid": [valid], "corpus__vocabulary": {"size": 60}, "stop__after": "1u"}
    trained(make, run, **changes)
    return "are its files exchanged?" in (run / "train.log").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_validation_set_with_its_files_exchanged_is_pointed_out(make: Make, tmp_path: Path) -> None:
    draw = random.Random(1)
    for language, words in LANGUAGES.items():
        for part, lines in (("train", 400), ("valid", 10)):
            text = "".join(" ".join(draw.choices(words, k=8)) + "\n" for _ in range(lines))
            (tmp_path / f"{part}.{language}").write_text(text, encoding="utf-8")
    train, right = ([f"{tmp_path}/{part}.en", f"{tmp_path}/{part}.de"] for part in ("train", "valid"))
    wrong, both = right[::-1], [{"files": train, "tag": "<2de>"}, {"files": train[::-1], "tag": "<2en>"}]
    assert said_to_be_exchanged(make, tmp_path / "wrong", train, {"files": wrong})
    assert not said_to_be_exchanged(make, tmp_path / "right", train, {"files": right})
    assert not said_to_be_exchanged(make, tmp_path / "both", both, {"files": wrong, "tag": "<2en>"})
    assert said_to_be_exchanged(make, tmp_path / "tag", both, {"files": wrong, "tag": "<2de>"})
