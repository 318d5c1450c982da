"""What the commands say of themselves, and what they make of what people expect them to understand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import small

from nmt_train import __version__, cli, config
from nmt_train.cli import export, import_model, plot, simulate, train, translate, validate
from nmt_train.common.unknown_key import unknown
from nmt_train.common.yaml_file import flatten


def said(capsys: pytest.CaptureFixture[str], command: Any, *arguments: str) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.run(command.command, arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", [train, simulate])
def test_without_arguments_it_shows_how_to_begin(capsys: pytest.CaptureFixture[str], command: Any) -> None:
    assert cli.run(command.command, []) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("usage: nmt-")
    assert "--config mine.yml" in shown
    assert "--help NAME" in shown
    assert len(shown.splitlines()) < 15


@pytest.mark.parametrize("command", [train, simulate, translate, validate, export, import_model, plot])
def test_every_command_has_a_version_and_help(capsys: pytest.CaptureFixture[str], command: Any) -> None:
    assert said(capsys, command, "--version") == f"nmt_train {__version__}\n"
    assert said(capsys, command, "--help").startswith("usage: nmt-")


def test_help_opens_with_examples_and_what_a_new_user_needs_and_names_the_sections(capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, train, "--help")
    assert "nmt-train --config mine.yml" in "\n".join(shown.splitlines()[:10])
    assert all(f"--{key} " in shown for key in ("run", "corpus.train", "corpus.valid", "model.preset", "stop.after", "mode"))
    assert "--optimizer.beta2" not in shown
    assert all(f"\n  {key.partition(':')[0]} " in shown for key in config.entries() if isinstance(key, str))


def test_help_of_a_key_or_a_section_explains_just_that(capsys: pytest.CaptureFixture[str]) -> None:
    one = said(capsys, train, "--help", "optimizer.warmup")
    assert one.startswith("optimizer.warmup: length of the linear rise")
    assert one.count("default:") == 1
    section = said(capsys, train, "--help", "optimizer")
    assert one in section
    assert section.count("(default:") == sum(key.startswith("optimizer.") for key in config.leaves())
    assert "(default: as in model.preset)" in said(capsys, train, "--help", "model.dim")
    assert "machines in this hostfile" in said(capsys, train, "--help", "hosts")
    assert said(capsys, simulate, "--help", "cluster").startswith("cluster: ")
    assert cli.run(train.command, ["--help", "optimizer.warmpu"]) == 2
    assert "unknown key optimizer.warmpu; did you mean optimizer.warmup?" in capsys.readouterr().err


def test_print_config_says_who_chooses_and_is_a_complete_config_file(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = small(demo, tmp_path / "run")
    values["model"] = {"preset": "tiny", "heads": 8}
    path = tmp_path / "x.yml"
    path.write_text(json.dumps(values), encoding="utf-8")
    assert cli.run(train.command, ["--config", str(path), "--print-config", "--mode", "sparse-overlap"]) == 0
    printed = capsys.readouterr().out
    shown = yaml.safe_load(printed)
    assert shown["model"] == {"preset": "tiny", "heads": 8}
    assert config.validate(shown, {}) == config.load([str(path)], {"mode": "sparse-overlap"})
    rest = printed.split("\n# Chosen by mode sparse-overlap, here for two workers; the log says it for yours:\n")[1]
    of_mode, defaults = rest.split("\n# Defaults (--help KEY explains a key):\n")
    assert "#   optimizer.beta1: 0.4 (0.9 configured, but updates of 2 workers are added up" in of_mode
    assert "#   optimizer.clip_norm: 1.0\n" in defaults
    named = set(re.findall(r"(?m)^#   ([\w.]+): ", printed))
    assert named | set(flatten(shown)) == set(config.leaves()) | {"optimizer.beta1"}, "every key has its place"


def test_print_config_keeps_what_differs_from_the_model_that_init_names(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.yml"
    path.write_text(json.dumps(small(demo, tmp_path / "run") | {"init": "a", "model": {"norm": "pre"}}), encoding="utf-8")
    assert cli.run(train.command, ["--config", str(path), "--print-config", "--mode", "sparse-overlap"]) == 0
    printed = capsys.readouterr().out
    shown = yaml.safe_load(printed)
    assert (shown["init"], shown["model"]) == ("a", {"norm": "pre"})
    assert config.validate(shown, {}) == config.load([str(path)], {"mode": "sparse-overlap"})
    assert {"model.preset", "model.dim", "model.tied"} <= set(re.findall(r"(?m)^#   ([\w.]+): auto$", printed))


def test_print_config_refuses_a_mode_that_there_is_not(demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.yml"
    path.write_text(json.dumps(small(demo, tmp_path / "run")), encoding="utf-8")
    assert cli.run(train.command, ["--config", str(path), "--print-config", "--mode", "sparse-overlp"]) == 2
    assert "did you mean sparse-overlap?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("optimizer.lr", "did you mean optimizer.learning_rate?"),
        ("batch_size", "did you mean batch.tokens, or batch.sentences?"),
        ("epochs", "did you mean stop.after, as in 10e"),
        ("corpus.test", "test a trained model with nmt-validate"),
        ("corpus.weights", "give every corpus its weight"),
        ("corpus.alignments", "give them to their corpus: corpus.train: [{files: [a, b], alignments: c}]"),
        ("corpus.trian", "did you mean corpus.train?"),
    ],
)
def test_the_names_of_other_programs_lead_to_ours(name: str, hint: str) -> None:
    assert hint in unknown(name, config.leaves())


def test_a_single_value_is_a_list_of_one(demo: Path, tmp_path: Path) -> None:
    values = small(demo, tmp_path / "run")
    values["validation"]["metrics"] = "bleu"
    loaded = config.validate(values, {})
    assert loaded.validation.metrics == ["bleu"]
