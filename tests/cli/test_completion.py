"""The script that `nmt-train --completion` prints, in bash as bash calls it."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT

from nmt_train import cli, config
from nmt_train.cli import train
from nmt_train.modes.table import MODES


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert cli.run(train.command, ["--completion"]) == 0
    path = tmp_path / "completion"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    return path


def in_bash(script: Path, command: str) -> list[str]:
    """The words that bash prints; no program can be started, so that completing is quick."""
    bash = shutil.which("bash")
    assert bash
    done = subprocess.run(
        [bash, "--norc", "-uc", f". {script}; {command}"], env={"PATH": "/none"}, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.split()


def completed(script: Path, command: str, word: str, before: str | None = None) -> list[str]:
    """What bash offers for a word that follows another."""
    return in_bash(script, f"_nmt_train {command} '{word}' '{before or command}'; echo ${{COMPREPLY[*]-}}")


def test_every_command_is_completed(script: Path) -> None:
    commands = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert set(commands) <= set(in_bash(script, "complete -p"))
    for command in commands:
        assert "--version" in completed(script, command, "-"), command


def test_all_keys_are_options_of_the_commands_that_train(script: Path) -> None:
    for command in ("nmt-train", "nmt-simulate"):
        assert {f"--{key}" for key in config.leaves()} < set(completed(script, command, "--"))
    assert completed(script, "nmt-train", "--optimizer.lea", "x") == ["--optimizer.learning_rate"]
    assert "--cluster" in completed(script, "nmt-simulate", "--c")


def test_values_with_names_are_completed_and_else_files(script: Path) -> None:
    assert completed(script, "nmt-train", "sparse-o", "--mode") == ["sparse-overlap"]
    assert set(completed(script, "/some/where/nmt-train", "", "--mode")) == {"auto", *MODES}
    assert completed(script, "nmt-train", "b", "--model.preset") == ["base", "big"]
    assert completed(script, "nmt-export", "", "--to") == ["huggingface", "ctranslate2", "marian"]
    assert completed(script, "nmt-train", "", "--config") == []
    assert "-o default" in " ".join(in_bash(script, "complete -p nmt-train"))


def test_the_figures_of_plot_are_completed_with_their_options(script: Path) -> None:
    assert {"convergence", "timeline"} <= set(completed(script, "nmt-plot", ""))
    assert completed(script, "nmt-plot", "--cl", "runs/mine") == ["--clock"]
    assert completed(script, "nmt-plot", "tr", "--clock") == ["training_seconds"]
