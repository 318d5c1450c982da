"""The built wheel: its files, and README's commands for one's own corpus where nothing but the wheel is installed."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import venv
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import ctranslate2
import pytest
from conftest import ROOT, Once
from installed import OFFLINE, borrow, wheel
from published import publish

# Three updates of the smallest model, on one core.
SHORT = "--stop.after 3u --model.preset tiny --batch.tokens 500 --threads 1 --devices cpu"


@pytest.fixture(scope="module")
def built(once: Once) -> Path:
    (path,) = once("wheel", wheel).glob("*.whl")
    return path


def metadata(built: Path) -> Message:
    with zipfile.ZipFile(built) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(files.read(name))


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package_and_no_other(built: Path) -> None:
    with zipfile.ZipFile(built) as files:
        names = {name for name in files.namelist() if ".dist-info/" not in name}
    folders = os.walk(ROOT / "nmt_train", followlinks=True)
    ours = {os.path.relpath(os.path.join(folder, file), ROOT) for folder, _, files in folders for file in files}
    assert names == {name for name in ours if "__pycache__" not in name}
    assert {"nmt_train/py.typed", "nmt_train/simulation/adviser/words_needed.csv"} <= names


@pytest.mark.slow
def test_the_metadata_says_what_a_package_index_shows(built: Path) -> None:
    found = metadata(built)
    assert found["License-Expression"] == "MIT"
    assert found["Description-Content-Type"] == "text/markdown"
    assert found.get_payload().strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()
    oldest = found["Requires-Python"].removeprefix(">=")
    classifiers = found.get_all("Classifier", [])
    assert f"Programming Language :: Python :: {oldest}" in classifiers


@pytest.mark.slow
def test_the_wheel_writes_every_recipe(built: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(built) as files:
        files.extractall(tmp_path / "there")
    code = """
import sys
from nmt_train.cli import train
assert train.__file__.startswith(sys.argv[1])
assert not any(train.command(["--example", name, name]) for name in sys.argv[2:])
"""
    recipes = ROOT / "configs" / "recipes"
    names = sorted(folder.name for folder in recipes.iterdir())
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "there")}
    subprocess.run(
        [sys.executable, "-P", "-c", code, tmp_path / "there", *names], check=True, cwd=tmp_path, env=environment
    )  # fmt: skip
    for name in names:
        files = {file.name: file.read_bytes() for file in (recipes / name).iterdir() if file.is_file()}
        assert {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} == files


def own_corpus() -> tuple[str, list[str]]:
    """README's configuration for one's own corpus, and its commands."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = re.search(r"^## Your own corpus\n(.*?)^## ", text, re.M | re.S)
    found = re.search(r"```yaml\n(.*?)```.*?```\n(.*?)```", section[1] if section else "", re.S)
    assert found is not None, "README.md has no configuration and commands under 'Your own corpus'"
    return found[1], found[2].splitlines()


def write_corpus(folder: Path) -> None:
    """Sentences of 6,000 invented words of each language, translated word by word: enough for a vocabulary of 8,000."""
    choice = random.Random(1)
    syllables = [first + second for first in "bdfgklmnprst" for second in ("a", "e", "i", "o", "u", "an", "er", "il")]
    english, german = ([sum_of(choice, syllables) for _ in range(6000)] for _ in range(2))
    for part, count in (("train", 3000), ("valid", 20), ("test", 20)):
        lines = [[choice.randrange(6000) for _ in range(choice.randint(3, 9))] for _ in range(count)]
        for language, words in (("en", english), ("de", german)):
            text = "".join(" ".join(words[number] for number in line) + "\n" for line in lines)
            (folder / f"{part}.{language}").write_text(text, encoding="utf-8")


def sum_of(choice: random.Random, syllables: list[str]) -> str:
    return "".join(choice.choices(syllables, k=choice.randint(2, 4)))


@pytest.mark.slow
def test_readmes_commands_for_ones_own_corpus_work_where_only_the_wheel_is_installed(built: Path, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home)
    given = metadata(built).get_all("Requires-Dist", [])
    requirements = [line.replace("extra ==", "'export' ==") for line in given if "extra" not in line or "export" in line]
    borrow(home, requirements)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PIP_"))} | OFFLINE
    install = [sys.executable, "-m", "pip", f"--python={home}/bin/python", "install", "-q", f"{built}[export]"]
    subprocess.run(install, check=True, env=environment)
    environment["PATH"] = f"{home / 'bin'}:{os.environ['PATH']}"

    def shell(line: str) -> str:
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    assert shell("python -c 'import nmt_train; print(nmt_train.__file__)'").startswith(str(home))
    write_corpus(tmp_path)
    publish(tmp_path, tmp_path / "opus-mt-en-de")  # in place of a download
    config, commands = own_corpus()
    (tmp_path / "mine.yml").write_text(config, encoding="utf-8")
    said = {}
    for command in commands:
        said[command.split()[0]] = shell(command.replace("--config mine.yml", f"--config mine.yml {SHORT}"))
    assert set(said) == {"nmt-train", "nmt-translate", "nmt-validate", "nmt-export", "nmt-import"}
    assert len((tmp_path / "test.out").read_text(encoding="utf-8").splitlines()) == 20
    for metric in ("cross-entropy", "bleu", "chrf"):
        assert metric in said["nmt-validate"]
    assert ctranslate2.Translator(str(tmp_path / "out")).translate_batch([["▁ba"]])
    resumed = shell(f"nmt-train --config mine.yml {SHORT.replace('3u', '4u')}")
    assert "continuing from runs/mine/checkpoints/3 at update 3" in resumed
