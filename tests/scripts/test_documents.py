"""Commands, options and keys that the pages show exist and have valid values: all are parsed as the programs parse them."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import ROOT

from nmt_train import cli, config
from nmt_train.cli import export, import_model, plot, simulate, train, translate, validate
from nmt_train.cli import options as settings
from nmt_train.codec import CODECS
from nmt_train.common import yaml_file
from nmt_train.common.errors import UserError
from nmt_train.common.unknown_key import unknown
from nmt_train.common.yaml_file import flatten
from nmt_train.modes import resolve as modes
from nmt_train.modes.table import MODES
from nmt_train.simulation import cluster_file

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "data/README.md")),
    *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("configs/recipes/*/README.md")),
]  # fmt: skip
PARSERS: Mapping[str, Callable[[], cli.Parser]] = {
    "nmt-train": train.parser, "nmt-simulate": simulate.parser, "nmt-translate": translate.parser,
    "nmt-validate": validate.parser, "nmt-export": export.parser, "nmt-import": import_model.parser, "nmt-plot": plot.parser,
}  # fmt: skip
NEEDED = {"corpus.train": "[a, b]", "corpus.valid": "[c, d]", "stop.after": "20e"}  # keys that every run has to give
LEAVES = config.leaves()
SECTIONS = {name.rsplit(".", 1)[0] for name in LEAVES if "." in name}
FENCE = re.compile(r"(?ms)^( *)```(\w*)\n(.*?)^ *```")
SPAN = re.compile(r"`([^`]+)`")
KEY = re.compile(r"^([a-z_]+(?:\.[a-z_0-9]+)*)(?:: (.+))?$", re.DOTALL)
FILE = re.compile(r"\.(yml|json|jsonl|md|png|csv|py|txt|model|safetensors|npz|spm)$")
PLACEHOLDER = re.compile(r"^([A-Z]+|[a-z])$")  # a value that the reader chooses: N, FILE, n
ENDS = ("|", "&", "&&", ";", "<", ">", ">>")  # of a command
JOB_SCRIPT = re.compile(r"^configs/slurm/[\w-]+\.sh$")  # passes its arguments to nmt-train
OTHERS = ("--with-ft", "--bind-to", "--mpi", "--signal", "--echo")  # options of mpirun, srun, sbatch and sacrebleu
OF_OTHERS = ("sacrebleu", "hf", "sbatch", "scancel", "mpirun", "srun")


class Shown(NamedTuple):
    """A text that a page shows, and where."""

    text: str
    where: str


def blocks(page: Path, *languages: str) -> Iterator[Shown]:
    """The code blocks in one of these languages; "": blocks without a language."""
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        if found[2] in languages:
            lines = [line.removeprefix(found[1]) for line in found[3].splitlines()]
            yield Shown("\n".join(lines), f"{page.relative_to(ROOT)}, line {text[: found.start()].count(chr(10)) + 2}")


def lines(page: Path) -> Iterator[Shown]:
    """The paragraphs and rows of tables; of tables that compare with other programs, only our column."""
    text = FENCE.sub(lambda found: "\n" * found[0].count("\n"), page.read_text(encoding="utf-8"))
    ours, number = False, 1
    for part in re.split(r"(?<=\n)(?=\n|[|#])|(?<=\|\n)|(?<=\n\n)", text):
        ours = part.startswith("|") and (ours or part.startswith("| here |"))
        yield Shown(part.split("|")[1] if ours else part.replace("\n", " "), f"{page.relative_to(ROOT)}, line {number}")
        number += part.count("\n")


def commands(text: str) -> Iterator[list[str]]:
    """The words of each of our commands in shell commands, from the name on, without what is left to the reader (`...`)."""
    for line in text.replace("\\\n", " ").splitlines():
        if not re.search(r"(?m)(^|\s)(nmt-|configs/slurm/)", line):
            continue
        reader = shlex.shlex(line, posix=True, punctuation_chars=True)
        reader.whitespace_split = True
        words = list(reader)
        for start, word in enumerate(words):
            if word in PARSERS or JOB_SCRIPT.match(word):
                rest = words[start + 1 :]
                end = next((number for number, each in enumerate(rest) if each in ENDS), len(rest))
                name = word if word in PARSERS else "nmt-train"
                yield [name, *(each for each in rest[:end] if each != "...")]


def checked(values: Mapping[str, str], files: Sequence[str] = ()) -> None:
    """Raise UserError if these keys do not exist, or cannot have these values, or not in the mode that they name."""
    found = config.load([file for file in files if (ROOT / file).is_file()], NEEDED | values)
    if found.mode not in (None, "auto"):
        modes.resolve(found, (0,) if found.mode == "single" else (0, 1, 2, 3))


@cache
def parser_of(command: str) -> cli.Parser:
    return PARSERS[command]()


@cache
def options_of(command: str) -> dict[str, argparse.Action]:
    """The options of a command, and of its subcommands."""
    found: dict[str, argparse.Action] = {}
    pending: list[argparse.ArgumentParser] = [parser_of(command)]
    for parser in pending:
        for action in parser._actions:
            found |= dict.fromkeys(action.option_strings, action)
            if isinstance(action, argparse._SubParsersAction):
                pending += action.choices.values()
    return found


@cache
def of_scripts() -> str:
    return "".join(
        path.read_text(encoding="utf-8") for path in ROOT.glob("scripts/**/*") if path.suffix in ("", ".py") and path.is_file()
    )


def run(words: Sequence[str]) -> None:
    """Raise UserError if a command would reject its arguments."""
    name, *arguments = words
    if "--help" in arguments:
        topic = arguments[arguments.index("--help") + 1 :]
        settings.explained(parser_of(name), topic[0]) if topic else None
    elif name in ("nmt-train", "nmt-simulate"):
        given = settings.parse(parser_of(name), arguments)
        known = {key: text for key, text in vars(given).items() if key in LEAVES and text is not None}
        checked({key: text for key, text in known.items() if "$" not in text}, given.config)  # a variable of the shell
        if getattr(given, "cluster", None) is not None:
            file = ROOT / given.cluster
            assert file.is_file() or "configs" not in file.parts, f"no such cluster file: {given.cluster}"
    else:
        parser_of(name).parse_args(arguments)


def mentioned(text: str) -> None:
    """Raise if options in a sentence do not exist, or values are wrong. An option may lack its value: `nmt-train --hosts`."""
    first, *rest = words = shlex.split(text.rpartition(" | ")[2])
    if first in OF_OTHERS:
        return
    known = PARSERS if first.startswith("--") or first in MODES else [first] if first in PARSERS else []
    values: dict[str, str] = {}
    for word, following in zip(words, [*rest, "--"], strict=True):
        option = word.split("=")[0]
        if not re.match(r"--[a-z]", word) or option in OTHERS:
            continue
        if not any(option in options_of(command) for command in known):
            of_script = first not in PARSERS and re.search(rf"{option}[\"')| ]", of_scripts())
            assert of_script, f"no option {option}"
        elif option.removeprefix("--") in LEAVES and not following.startswith("--") and not PLACEHOLDER.match(following):
            values[option.removeprefix("--")] = following
    several = first in PARSERS or any(key in values for key in ("corpus.train", "corpus.valid"))
    checked(values if several or first not in MODES else {"mode": first} | values)


@pytest.fixture(autouse=True)
def added(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codecs that a page explains how to add exist while it is tested."""
    page = getattr(request.node, "callspec", None) and request.node.callspec.params.get("page")
    patches = [block.text for block in blocks(page, "diff")] if page else []
    patches += [file.read_text(encoding="utf-8") for file in page.parent.glob("*.patch")] if page else []
    for name in re.findall(r'(?m)^\+ +"([\w-]+)": ', "\n".join(patches)):
        monkeypatch.setitem(CODECS, name, CODECS["int8"])


def problems(pairs: Sequence[tuple[Shown, Callable[[str], object]]]) -> list[str]:
    found = []
    for shown, check in pairs:
        try:
            check(shown.text)
        except (UserError, AssertionError) as error:
            found.append(f"{shown.where}: {shown.text!r}: {error}")
    return found


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_command_in_a_code_block_is_accepted(page: Path) -> None:
    found = [
        (Shown(shlex.join(words), block.where), words)
        for block in blocks(page, "", "bash", "sh")
        for words in commands(block.text)
    ]
    wrong = problems([(shown, lambda text: run(shlex.split(text))) for shown, _ in found])
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_command_and_option_in_a_sentence_exists(page: Path) -> None:
    spans = (Shown(span, line.where) for line in lines(page) for span in SPAN.findall(line.text))
    shown = [span for span in spans if re.search(r"(^| )--[a-z]", span.text) or span.text.split()[0] in PARSERS]
    assert problems([(span, mentioned) for span in shown]) == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_options_in_a_row_of_a_table_fit_the_mode_in_the_row(page: Path) -> None:
    wrong = []
    for line in lines(page):
        spans = SPAN.findall(line.text)
        mode = next((span for span in spans if span in MODES), None)
        if line.text.startswith("|") and mode:
            options = [span for span in spans if span.startswith("--")]
            wrong += problems([(Shown(f"{mode} {option}", line.where), mentioned) for option in options])
    assert wrong == []


def key(text: str) -> None:
    """Raise UserError if a text has the form of a key of the configuration, with or without a value, and is wrong."""
    found = KEY.match(text)
    if not found or FILE.search(found[1]) or found[1].endswith(".step"):
        return
    name, value = found[1], found[2]
    if name in LEAVES and value is not None and not PLACEHOLDER.match(value):
        checked({name: value} | ({"optimizer.schedule": "cosine"} if name == "optimizer.cosine_until" else {}))
    elif "." in name and name.split(".")[0] in SECTIONS and name not in {*LEAVES, *SECTIONS}:
        raise UserError(unknown(name, config.leaves()))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_key_in_a_sentence_exists_and_may_have_the_value(page: Path) -> None:
    spans = [Shown(span, line.where) for line in lines(page) for span in SPAN.findall(line.text)]
    assert problems([(span, key) for span in spans]) == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_yaml_block_is_a_valid_configuration_or_cluster_file(page: Path, tmp_path: Path) -> None:
    shutil.copy(ROOT / "configs" / "clusters" / "k40.yml", tmp_path)

    def read(text: str) -> None:
        values = yaml_file.value(text)
        if isinstance(values, list):  # entries of corpus.train
            text = "corpus: {train: " + str(values) + "}"
        file = tmp_path / "shown.yml"
        file.write_text(text, encoding="utf-8")
        if "nodes" in values:
            cluster_file.load(file)
            return
        given = set(flatten(yaml_file.value(text)))
        config.load([str(file)], {name: value for name, value in NEEDED.items() if name not in given})

    assert problems([(block, read) for block in blocks(page, "yaml")]) == []


def test_the_table_for_users_of_other_programs_begins_every_row_with_keys_or_options_of_ours() -> None:
    text = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    table = re.search(r"(?m)^\| here \|.*\n\|[-|]+\n((?:\|.*\n)+)", text)
    assert table
    assert table[0].splitlines()[0] == "| here | Marian | OpenNMT | fairseq | Hugging Face |"
    assert len(table[1].splitlines()) >= 30
    columns = table[0].splitlines()[0].count("|")
    names = {"": LEAVES, **{command: options_of(command) for command in PARSERS}}
    last = {name.rsplit(".", 1)[-1] for name in LEAVES}
    for row in table[1].splitlines():
        spans = SPAN.findall(row.split("|")[1])
        assert spans, row
        assert row.replace("\\|", "").count("|") == columns, row
        for span in spans:
            word = re.split(r"[:\s]", span)[0]
            assert word in names or word in names[""] or word in last, row


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (run, "nmt-train --config mine.yml --batch.token 4096"),
        (run, "nmt-train --config mine.yml --mode vanila"),
        (run, "nmt-train --config mine.yml --mode sync --server.up half"),
        (run, "nmt-simulate --config mine.yml --cluster configs/clusters/none.yml"),
        (run, "nmt-train --help optimiser"),
        (mentioned, "--tiles.keep many"),
        (mentioned, "--keep 86"),
        (mentioned, "nmt-train --timing-only 5"),
        (mentioned, "sync --server.up half"),
        (key, "optimizer.betas"),
        (key, "stop.after: later"),
    ],
)
def test_what_does_not_exist_is_found(check: Callable[[object], None], text: str) -> None:
    shown = Shown(text, "here")
    assert problems([(shown, (lambda given: run(given.split())) if check is run else check)])
