"""The recipes of configs/recipes: each is written by nmt-train --example, has a short README, and its config trains."""

from __future__ import annotations

import json
import os
import random
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from processes import finish
from published import publish

from nmt_train import cli
from nmt_train.cli import export, import_model, plot, simulate, train, translate, validate
from nmt_train.cli import options as settings
from nmt_train.codec import CODECS
from nmt_train.run import checkpoint

RECIPES = ROOT / "configs" / "recipes"
CLUSTER = ROOT / "configs" / "clusters" / "thesis-2x1.yml"
NAMES = sorted(folder.name for folder in RECIPES.iterdir())
COMMANDS = {"nmt-import": import_model, "nmt-translate": translate, "nmt-validate": validate, "nmt-export": export,
            "nmt-plot": plot}  # fmt: skip
OTHERS = {".", "cd", "cp", "curl", "for", "done", "git", "head", "hf", "ln", "pip", "python", "sed", "wc"}
TINY = {
    "threads": 1, "devices": "cpu", "precision": "fp32", "batch.tokens": 1500, "validation.every": "4u", "validation.beam": 1,
    "stop.after": "4u",
}  # fmt: skip
SMALL = {"encoder_layers": 1, "decoder_layers": 1, "dim": 16, "ffn_dim": 32, "heads": 2}
SIZES = {f"model.{name}": value for name, value in SMALL.items()}


def call(command: Any, *arguments: Any) -> int:
    return cli.run(command.command, [str(argument) for argument in arguments])


def translate_file(source: str, into: str, *arguments: Any) -> None:
    with (
        open(source, encoding="utf-8") as lines, open(into, "w", encoding="utf-8") as translations,
        pytest.MonkeyPatch.context() as patch,
    ):  # fmt: skip
        patch.setattr(sys, "stdin", lines)
        patch.setattr(sys, "stdout", translations)
        assert call(translate, *arguments) == 0


def options(values: dict[str, Any]) -> list[str]:
    """As on a command line; a list is written as in YAML."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    return [word for name, text in texts.items() for word in (f"--{name}", text)]


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, demo: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe as nmt-train writes it, beside a corpus with the names that the recipes use; it is the working directory."""
    folder = tmp_path / "recipe"
    assert call(train, "--example", request.param, folder) == 0
    for file in demo.iterdir():
        shutil.copy(file, folder)
    monkeypatch.chdir(folder)
    return folder


def recipe(name: str) -> Any:
    return pytest.mark.parametrize("folder", [name], indirect=True)


def scores(run: Path, metric: str = "cross-entropy") -> list[float]:
    events = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [event[metric] for event in events if event["event"] == "validation"]


# --- writing them


def test_example_alone_lists_every_recipe_with_a_line_on_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(train, "--example") == 0
    shown = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in shown] == NAMES
    assert all(len(line.split(maxsplit=1)[1]) > 20 for line in shown)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_written_as_it_is_into_a_folder_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(train, "--example", name) == 0
    assert f"{name}/README.md says how to use it" in capsys.readouterr().err
    files = {file.name: file.read_bytes() for file in (RECIPES / name).iterdir() if file.is_file()}
    assert {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} == files
    assert {"README.md", "config.yml"} <= files.keys()


def test_an_unknown_recipe_is_answered_with_the_known_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(train, "--example", "one-devise", tmp_path / "new") == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --example: there is no recipe one-devise; did you mean one-device? choose one of these:\n")
    assert [line.split()[0] for line in said.splitlines()[1:]] == NAMES
    assert not (tmp_path / "new").exists()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("mine", encoding="utf-8")
    for taken in (tmp_path, tmp_path / "mine"):
        assert call(train, "--example", "distill", taken) == 2
        said = capsys.readouterr().err
        assert said == (
            f"error: --example: {taken} exists and is not an empty folder; name another: --example distill FOLDER\n"
        )
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]
    (tmp_path / "empty").mkdir()
    assert call(train, "--example", "distill", tmp_path / "empty") == 0


def test_a_third_word_after_example_is_too_much(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(train, "--example", "distill", tmp_path / "a", "b") == 2
    assert "--example takes a name and a folder; b is too much" in capsys.readouterr().err


# --- their READMEs


def commands(name: str) -> Iterator[list[str]]:
    """The commands in a recipe's README, without comments and redirections: the lines of blocks that begin with one, and those
    in the text that have options.
    """
    text = (RECIPES / name / "README.md").read_text(encoding="utf-8")
    within = re.findall(r"`(nmt-\w+ --config [^`]+)`", text)
    for block in [*re.findall(r"(?sm)^```\n((?:nmt-|scripts/|sudo ).*?)^```", text), *within]:
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            for mark in ("<", ">"):
                while mark in words:
                    del words[words.index(mark) : words.index(mark) + 2]
            one: list[str] = []
            for word in (*words, "&"):
                if word in ("|", "&&", "&"):
                    yield one
                    one = []
                elif word != "sudo":
                    one.append(word)


@pytest.mark.parametrize("name", NAMES)
def test_a_readme_has_at_most_forty_lines(name: str) -> None:
    assert len((RECIPES / name / "README.md").read_text(encoding="utf-8").splitlines()) <= 40


@pytest.mark.parametrize("name", NAMES)
def test_every_command_of_a_readme_has_options_and_files_that_exist(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT if name == "new-codec" else RECIPES / name)
    monkeypatch.setitem(CODECS, "sign", runpy.run_path(str(RECIPES / "new-codec" / "sign.py"))["Sign"])
    found = [words for words in commands(name) if words]  # none after the & of a line
    assert any(words[0].startswith("nmt-") or words[0].startswith("scripts/") for words in found)
    for program, *arguments in found:
        if program in ("nmt-train", "nmt-simulate"):
            given = settings.parse((train if program == "nmt-train" else simulate).parser(), arguments)
            if given.config:
                settings.resolve(given)
        elif program in COMMANDS:
            COMMANDS[program].parser().parse_args(arguments)
        elif program.startswith("scripts/"):
            assert os.access(ROOT / program, os.X_OK), program
            text = (ROOT / program).read_text(encoding="utf-8")
            assert all(f'"{option}"' in text for option in arguments if option.startswith("--")), arguments
        else:
            assert program in OTHERS, program


# --- what they do


@pytest.mark.slow
@recipe("one-device")
def test_one_device_trains_with_what_is_decided_for_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = {name: TINY[name] for name in ("threads", "devices", "stop.after", "validation.every", "validation.beam")}
    assert call(train, "--config", "config.yml", "--corpus.vocabulary.size", 120, *options(tiny)) == 0
    said = capsys.readouterr().err
    for key in ("model.preset tiny", "precision ", "batch.tokens 2,048", "optimizer.learning_rate 0.006"):
        assert f"decided: {key}" in said
    assert call(validate, "runs/first", "--test", "test.en", "test.de") == 0


@pytest.mark.slow
@recipe("fine-tune")
def test_a_published_model_is_fine_tuned_from_where_it_is(folder: Path, demo: Path) -> None:
    publish(demo, folder / "opus-mt-en-de")
    assert call(import_model, "opus-mt-en-de", "model") == 0
    more = {**TINY, "stop.after": "30u", "validation.every": "15u", "optimizer.learning_rate": 0.003}
    assert call(train, "--config", "config.yml", *options(more)) == 0
    before, between, after = scores(folder / "runs" / "adapted")
    assert before > between > after
    assert call(export, "runs/adapted", "out", "--to", "huggingface") == 0
    assert json.loads((folder / "out" / "config.json").read_text(encoding="utf-8"))["model_type"] == "marian"


@pytest.mark.slow
@recipe("several-corpora")
def test_several_corpora_have_their_shares_and_each_direction_its_score(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for language in ("en", "de"):
        shutil.copy(f"train.{language}", f"crawled.{language}")
    few = ("--corpus.vocabulary.size", 150)
    assert call(train, "--config", "config.yml", *few, *options({**TINY, **SIZES})) == 0
    said = capsys.readouterr().err
    shares = re.findall(r"([\w-]+) ([\d,]+) pairs \(([\d.]+%)", said)
    assert shares[:3] == [("to-german", "720", "40.0%"), ("to-english", "720", "40.0%"), ("crawled", "360", "20.0%")]
    assert shares[3:] == [("to-german", "600", "50.0%"), ("to-english", "600", "50.0%"), ("crawled", "0", "0.0%")]
    assert len(scores(folder / "runs" / "both", "cross-entropy@to-english")) == 1
    assert call(validate, "runs/both") == 0


@pytest.mark.slow
@recipe("terms")
def test_a_model_trained_with_annotated_terms_uses_those_that_a_line_demands(folder: Path) -> None:
    """Each English word of the list has two translations, of which one is drawn at random for every pair."""
    names = {"boxes": ("Kisten", "Schachteln"), "bags": ("Säcke", "Beutel"), "rice": ("Reis", "Gries")}
    Path("terms.tsv").write_text(
        "".join(f"{one}\t{word}\n" for one, words in names.items() for word in words), encoding="utf-8"
    )
    chance = random.Random(1)
    for part, count in (("train", 900), ("valid", 20), ("test", 100)):
        numbers = [chance.choice([("two", "zwei"), ("six", "sechs"), ("ten", "zehn")]) for _ in range(count)]
        goods = [chance.choice(sorted(names)) for _ in range(count)]
        source = [f"I need {number} {good}." for (number, _), good in zip(numbers, goods, strict=True)]
        target = [
            f"Ich brauche {number} {chance.choice(names[good])}." for (_, number), good in zip(numbers, goods, strict=True)
        ]
        for language, text in (("en", source), ("de", target)):
            Path(f"{part}.{language}").write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
    script = [sys.executable, "terms.py"]
    for part in ("train", "test"):
        out = "annotated" if part == "train" else "demanded"
        subprocess.run([*script, "annotate", "terms.tsv", f"{part}.en", f"{part}.de", out], check=True)
    more = {**TINY, **SIZES, "corpus.vocabulary.size": 50, "stop.after": "300u", "validation.every": "300u", "model.dim": 64}
    more |= {f"model.{name}": value for name, value in (("encoder_layers", 2), ("decoder_layers", 2), ("ffn_dim", 64))}
    more |= {"model.dropout": 0, "model.label_smoothing": 0, "optimizer.learning_rate": 0.005, "optimizer.warmup": 30}
    assert call(train, "--config", "config.yml", *options(more)) == 0
    shares = []
    for source in ("test.en", "demanded.source"):
        translate_file(source, "out", "--model", "runs/terms", "--beam", 1)
        command = [*script, "accuracy", "terms.tsv", "test.en", "test.de", "out"]
        said = subprocess.run(command, check=True, capture_output=True).stdout.decode()
        shares.append(float(re.findall(r"([\d.]+)%", said)[0]))
    assert shares[0] < 75, "the source alone does not say which"
    assert shares[1] > 90


@pytest.mark.slow
@recipe("distill")
def test_a_student_of_a_teachers_translations_is_served_by_ctranslate2(folder: Path) -> None:
    config = {"run": "teacher", "corpus": {"train": ["train.en", "train.de"], "valid": ["valid.en", "valid.de"]}}
    Path("teacher.yml").write_text(json.dumps(config), encoding="utf-8")
    size = ("--corpus.vocabulary.size", 120)
    assert call(train, "--config", "teacher.yml", *size, *options({**TINY, **SIZES})) == 0
    translate_file("train.en", "teacher.de", "--model", "teacher", "--beam", 1, "--on-error", "skip")
    assert len(Path("teacher.de").read_text(encoding="utf-8").splitlines()) == 600
    sizes = {name: value for name, value in SIZES.items() if name != "model.decoder_layers"}
    assert call(train, "--config", "config.yml", *options({**TINY, **sizes})) == 0
    assert Path("runs/student/vocabulary.model").read_bytes() == Path("teacher/vocabulary.model").read_bytes()
    assert call(validate, "runs/student", "teacher", "--test", "test.en", "test.de", "--compare", "--beam", 1) == 0
    assert call(export, "runs/student", "student", "--to", "ctranslate2", "--quantize", "int8") == 0
    assert len(served("student", "Six past seven.\ntwelve\n").splitlines()) == 2


def served(model: str, text: str) -> str:
    """What the recipe's service answers to a text."""
    service = subprocess.Popen([sys.executable, "serve.py", model, "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert service.stdout is not None
        address = service.stdout.readline().split()[0]
        with urllib.request.urlopen(address, data=text.encode()) as answer:
            return str(answer.read().decode())
    finally:
        service.kill()
        service.wait()
        if service.stdout is not None:
            service.stdout.close()


FOUR = {**TINY, "corpus.vocabulary.size": 120, "model.preset": "tiny", **SIZES, "validation.every": "2u"}


def training_command(name: str, mode: str) -> list[str]:
    """The options of the README's nmt-train command with this mode, but for those that name machines."""
    (found,) = [words for words in commands(name) if words[:1] == ["nmt-train"] and mode in words]
    return found[1 : found.index("--hosts")] + found[found.index("--hosts") + 2 :]


@pytest.mark.slow
@recipe("four-machines")
def test_several_machines_train_as_the_recipe_says(folder: Path) -> None:
    """Two ranks of this machine in the place of four machines. (tests/training/test_ranks.py trains with mode auto.)"""
    given = [word for word in training_command("four-machines", "sparse-local") if word not in ("--restarts", "20")]
    more = options({**FOUR, "devices": "cpu x 2"})
    done = finish([sys.executable, "-m", "nmt_train.cli.train", *given, *more], os.environ, 300)
    assert done.returncode == 0, done.stderr
    assert "2 ranks" in done.stderr, done.stderr
    assert scores(folder / "runs" / "four")


def test_the_hosts_of_the_recipe_are_four_machines() -> None:
    from nmt_train.launch.restarts import read_hosts

    assert len(read_hosts(RECIPES / "four-machines" / "hosts")) == 4


@pytest.mark.slow
@recipe("thesis-figure")
def test_the_modes_of_the_thesis_train_with_one_configuration_and_are_drawn(folder: Path) -> None:
    """Two simulated machines in the place of real ones."""
    few = {"corpus.vocabulary.size": 120, **SIZES, **{name: TINY[name] for name in ("threads", "devices")}}
    few |= {"stop.after": "6u", "validation.every": "3u"}
    runs = []
    for mode in ("single", "vanilla", "overlap", "thesis-sparse", "thesis-sparse-overlap"):
        command, machines = (train, []) if mode == "single" else (simulate, ["--cluster", CLUSTER])
        more = options({**few, "mode": mode, "run": f"runs/{mode}"})
        assert call(command, "--config", "config.yml", *machines, *more) == 0
        runs.append(f"runs/{mode}")
    for kind in ("convergence", "timeline"):
        assert call(plot, kind, *runs, "--output", f"{kind}.png") == 0
        assert (folder / f"{kind}.png").stat().st_size > 1000


@pytest.mark.slow
def test_the_new_codec_is_registered_by_the_recipe_keeps_what_it_does_not_send_and_trains(demo: Path, tmp_path: Path) -> None:
    copy = tmp_path / "clone"
    for name in ("nmt_train", "configs", "tests", "scripts"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    shutil.copy(RECIPES / "new-codec" / "sign.py", copy / "nmt_train" / "codec")
    apply = finish(["git", "-C", str(copy), "apply", str(RECIPES / "new-codec" / "register.patch")], os.environ, 60)
    assert apply.returncode == 0, apply.stderr
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    tests = [str(copy / "tests" / "codec" / "test_codecs.py"), "-k", "rounding and sign", "-p", "no:cacheprovider"]
    tested = finish([sys.executable, "-P", "-m", "pytest", "--rootdir", str(copy), *tests], environment, 300)
    assert "1 passed" in tested.stdout, tested.stdout
    values = {
        "corpus.train": [f"{demo}/train.en", f"{demo}/train.de"],
        "corpus.valid": [f"{demo}/valid.en", f"{demo}/valid.de"],
    }
    few = {**values, **TINY, "devices": "cpu x 2", "corpus.vocabulary.size": 120, "run": str(tmp_path / "run")}
    configs = [copy / "configs" / "quickstart.yml", copy / "configs" / "recipes" / "new-codec" / "config.yml"]
    command = [sys.executable, "-P", "-m", "nmt_train.cli.train", *(f"--config={path}" for path in configs), *options(few)]
    done = finish(command, environment, 300)
    assert done.returncode == 0, done.stderr
    saved = checkpoint.load(tmp_path / "run" / "last")
    assert saved.facts["config"]["server"]["up"] == "sign"
    assert all(float(saved.tensors(f"worker-{rank}")["residual"].abs().sum()) > 0 for rank in range(2))
