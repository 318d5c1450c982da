"""OpusTrainer's configurations as ours: the same shares and lengths of stages, and a sentence for what we do not have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from nmt_train import cli, config
from nmt_train.cli import train
from nmt_train.common.errors import UserError
from nmt_train.corpus.mixture import Mixture
from nmt_train.corpus.opustrainer import convert

FILE = """\
datasets:
  clean: data/clean
  medium: data/medium.tsv.gz
  dirty: data/dirty
stages:
  - start
  - mid
  - end
start:
  - clean 0.8
  - medium 0.2
  - dirty 0
  - until clean 2 # passes
mid:
  - clean 0.6
  - medium 0.3
  - dirty 0.1
  - until medium 1
end:
  - clean 0.4
  - medium 0.3
  - dirty 0.3
  - until dirty 5
modifiers:
- UpperCase: 0.05
- TitleCase: 0.1
seed: 1111
num_fields: 2
trainer: /path/to/marian
"""
SIZES = {"clean": 400, "medium": 600, "dirty": 900}


def write(folder: Path, text: str = FILE) -> Path:
    (folder / "data").mkdir(exist_ok=True)
    for name, size in SIZES.items():
        (folder / "data" / name).write_text("a\tb\textra\n" * size, encoding="utf-8")
    (folder / "data" / "medium.tsv.gz").write_bytes(__import__("gzip").compress(b"a\tb\n" * SIZES["medium"]))
    path = folder / "train.yml"
    path.write_text(text, encoding="utf-8")
    return path


def loaded(folder: Path, text: str = FILE) -> tuple[config.Config, dict[str, Any]]:
    """The configuration that nmt-train reads from what was converted, and its values."""
    written = folder / "mixture.yml"
    written.write_text(convert(write(folder, text)), encoding="utf-8")
    values = yaml.safe_load(written.read_text(encoding="utf-8"))
    needed = {"corpus.valid": "[v.en, v.de]"} | ({} if "stop" in values else {"stop.after": "9e"})
    return config.load([str(written)], needed), values


def test_shares_and_lengths_of_the_stages_are_those_of_opustrainer(tmp_path: Path) -> None:
    found, _ = loaded(tmp_path)
    parts = {part.name: part for part in found.corpus.parts}
    assert list(parts) == ["clean", "medium", "dirty"]
    assert parts["clean"].files == [[str(tmp_path / "data" / "clean")]] or parts["clean"].files == [
        str(tmp_path / "data" / "clean")
    ]
    mixture = Mixture(found.corpus, np.split(np.arange(1900), np.cumsum([400, 600])), found.seed)
    drawn = np.zeros(3)
    shares, starts = [(0.8, 0.2, 0.0), (0.6, 0.3, 0.1), (0.4, 0.3, 0.3)], [0, *found.corpus.stages]
    ends = [*found.corpus.stages, int(found.stop.after[0].amount)]
    expected = [2 * 400 / 0.8, 600 / 0.3, 5 * 900 / 0.3]  # pairs of each stage: the passes over the dataset that ends it
    for share, start, end, length in zip(shares, starts, ends, expected, strict=True):
        counts = np.sum([mixture.counts(epoch) for epoch in range(start, end)], axis=0)
        assert np.allclose(counts / counts.sum(), share, atol=0.01)
        assert counts.sum() == pytest.approx(length, rel=0.02)
        drawn += counts
    assert (found.seed, found.corpus.parts[0].noise.upper, found.corpus.parts[0].noise.title) == (1111, 0.05, 0.1)  # type: ignore[union-attr]


def test_a_last_stage_without_end_leaves_the_end_of_training_open(tmp_path: Path) -> None:
    _, values = loaded(tmp_path, FILE.replace("until dirty 5", "until dirty inf"))
    assert "stop" not in values
    text = convert(write(tmp_path, FILE.replace("until dirty 5", "until dirty inf")))
    assert re.search(r"# end: from epoch \d+ on; until inf passes over dirty: without end", text)


def test_a_single_stage_needs_no_epochs(tmp_path: Path) -> None:
    text = "datasets: {clean: data/clean}\nstages: [only]\nonly:\n  - clean 1.0\n  - until clean inf\n"
    _, values = loaded(tmp_path, text)
    assert values == {"corpus": {"train": [{"name": "clean", "files": [[str(tmp_path / "data" / "clean")]], "weight": 1.0}]}}


def test_a_stage_with_a_mix_and_the_same_modifiers_is_the_same(tmp_path: Path) -> None:
    extended = FILE.replace(
        "start:\n  - clean 0.8\n  - medium 0.2\n  - dirty 0\n  - until clean 2 # passes\n",
        "start:\n  mix: [clean 0.8, medium 0.2, until clean 2]\n  modifiers: [UpperCase: 0.05, [TitleCase: 0.1]]\n",
    )
    assert loaded(tmp_path, extended)[1] == loaded(tmp_path)[1]


WRONG = {
    "- UpperCase: 0.05": [
        ("- Tags: 0.05", "modifier Tags: nmt-train has only UpperCase, TitleCase or Typos; remove it"),
        ("- Typos: 0.1\n  char_swap: 0.2", "modifier Typos: nmt-train does not have char_swap"),
        ("- UpperCase: often", "modifier UpperCase: often is not a probability"),
        ("- UpperCase: 1.5", "modifier UpperCase: 1.5 is not a probability"),
    ],
    "  - dirty 0\n": [
        ("  - dirtier 0\n", r"line 12: stage start: 'dirtier 0' is not a dataset \(clean, medium or dirty\) and its weight"),
        ("  - dirty much\n", "line 12: stage start: 'dirty much' is not a dataset"),
        ("  - dirty -1\n", "line 12: stage start: 'dirty -1' is not a dataset"),
    ],
    "until clean 2": [
        ("until dirty 2", "line 13: stage start: 'until dirty 2' is not `until DATASET PASSES` with a dataset of this stage"),
        ("clean 2", "stage start: 'clean 2' is not `until"),
        ("until clean inf", "stage start never ends"),
    ],
    "seed: 1111": [
        ("sed: 1111", "line 27: sed: is neither a stage nor a key"),
        ("seed: 1\nstages2: []", "stages2: is neither"),
    ],
    "stages:\n": [("stages: []\nrest:\n", "stages: list the names")],
    "  - end\n": [("  - finish\n", "end: is neither a stage|stage finish: list its datasets")],
    "clean: data/clean": [("clean: data/absent", "absent: No such file")],
}


@pytest.mark.parametrize(("there", "instead", "said"), [(key, *entry) for key, entries in WRONG.items() for entry in entries])
def test_what_we_do_not_have_is_refused_by_name(tmp_path: Path, there: str, instead: str, said: str) -> None:
    assert there in FILE
    with pytest.raises(UserError, match=said):
        convert(write(tmp_path, FILE.replace(there, instead)))


def test_modifiers_of_a_single_stage_are_refused(tmp_path: Path) -> None:
    text = FILE.replace("start:\n  - clean 0.8\n  - medium 0.2\n  - dirty 0\n  - until clean 2 # passes\n",
                        "start:\n  mix: [clean 1, until clean 2]\n  modifiers: [{UpperCase: 0.5}]\n")  # fmt: skip
    with pytest.raises(UserError, match="stage start: in nmt-train, noise is the same in all stages"):
        convert(write(tmp_path, text))


def test_the_option_prints_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(train.command, ["--opustrainer", str(write(tmp_path))]) == 0
    assert capsys.readouterr().out == convert(tmp_path / "train.yml")
