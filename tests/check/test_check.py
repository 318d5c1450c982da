"""nmt-train --check as a user calls it: one page, nothing trained or written, and all reasons that prevent training."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import small
from torch.autograd.graph import saved_tensors_hooks

from nmt_train import cli, config, device
from nmt_train.check import memory, resources
from nmt_train.cli import train
from nmt_train.corpus.batches import Batches
from nmt_train.corpus.store import open_stores
from nmt_train.corpus.vocabulary import Vocabulary
from nmt_train.model.transformer import Transformer
from nmt_train.simulation.timing import shapes_of

WORDS = {"en": "the a house tree water goes sees green old small with under and".split(),
         "de": "der die haus baum wasser geht sieht grün alt klein mit neben und".split()}  # fmt: skip


class Checked(NamedTuple):
    status: int
    page: str
    said: str

    def line(self, what: str, count: int = 1) -> str:
        """The count-th line of the page that begins so, with its warning."""
        return re.findall(rf"(?m)^  {what}\b.*(?:\n +warning: .*)?", self.page)[count - 1]


Pairs = list[tuple[str, str]]


def sentences(count: int, seed: int = 1) -> Pairs:
    """Pairs whose sides have words of two languages."""
    chance = random.Random(seed)

    def sentence(language: str) -> str:
        return " ".join(chance.choice(WORDS[language]) for _ in range(chance.randint(8, 14)))

    return [(sentence("en"), sentence("de")) for _ in range(count)]


class Checks:
    """Writes corpora and checks a configuration with them."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys

    def write(self, name: str, pairs: Pairs, end: str = "") -> list[str]:
        files = [str(self.folder / f"{name}.{side}{end}") for side in ("en", "de")]
        for number, file in enumerate(files):
            text = "".join(pair[number] + "\n" for pair in pairs).encode()
            Path(file).write_bytes(gzip.compress(text) if end else text)
        return files

    def __call__(self, files: Any, valid: Any = None, *options: str, **changes: Any) -> Checked:
        valid = valid or self.write("valid", sentences(30, seed=2))
        values = {
            **small(self.folder, self.folder / "run"),
            "corpus": {"train": files, "valid": valid, "vocabulary": {"size": 45}},
        }
        values["corpus"] |= changes.pop("corpus", {})
        file = self.folder / "mine.yml"
        file.write_text(json.dumps(values | changes), encoding="utf-8")
        status = cli.run(train.command, ["--config", str(file), "--check", *options])
        return Checked(status, *self._capsys.readouterr())


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Checks:
    return Checks(tmp_path, capsys)


def test_a_good_corpus_has_no_warning_and_nothing_is_written(check: Checks) -> None:
    files = check.write("train", sentences(400))
    before = sorted(check.folder.rglob("*"))
    found = check(files)
    assert (found.status, found.page.count("warning:")) == (0, 0), found.page + found.said
    assert found.page.splitlines()[-1] == "Nothing prevents training (0 warnings)."
    assert "pairs       400, the same number of lines on both sides" in found.page
    assert "scripts     source Latin 100%; target Latin 100%" in found.line("scripts")
    assert "begins in" in found.line("run")
    assert "45 pieces, to be trained" in found.line("vocabulary")
    assert {path.name for path in check.folder.rglob("*")} - {path.name for path in before} == {
        "valid.en", "valid.de", "mine.yml"
    }  # fmt: skip


def test_each_corpus_of_a_mixture_has_its_lines_also_if_it_is_compressed(check: Checks) -> None:
    corpora = [
        {"name": "clean", "files": check.write("clean", sentences(300)), "weight": 1},
        {"name": "crawled", "files": check.write("crawled", sentences(100, seed=3), ".gz"), "weight": 3, "until": "2e"},
    ]
    found = check(corpora)
    assert found.status == 0, found.said
    assert "corpus.train, clean\n  pairs       300," in found.page
    assert "corpus.train, crawled\n  pairs       100," in found.page
    assert "clean 100 pairs (25.0%; it has 300), crawled 300 pairs (75.0%; it has 100)" in found.page


def test_bad_pairs_are_counted_and_each_warning_says_what_to_do(check: Checks) -> None:
    pairs = [*sentences(200), *[("same", "same")] * 20, *[("", "nur links")] * 20]
    found = check(check.write("train", pairs), check.write("valid", pairs[:10]))
    assert found.status == 0, found.said
    assert "20 (8.3%) have an empty side, and are left out\n" in found.line("empty")
    assert "warning: check that equal line numbers belong together" in found.line("empty")
    assert "20 (8.3%) have a target equal to the source\n" in found.line("copies")
    assert "warning: the model learns to copy" in found.line("copies")
    assert "8.6% are equal to an earlier pair" in found.line("repeated")
    assert "10 (100.0%) are in the training corpora, too\n" in found.line("leaked")
    assert "warning: its metrics will look too good" in found.line("leaked")


def test_long_lines_and_other_scripts_are_noticed(check: Checks) -> None:
    pairs = [*sentences(200), *[("der " * 300, "die")] * 10, *[("привет мой старый друг", "hallo alter freund")] * 10]
    found = check(check.write("train", pairs), corpus={"max_skipped": 0.5})
    assert "warning: raise corpus.max_length" in found.line("over-long")
    assert "of the source lines are in another script than Latin: remove lines of other languages" in found.line("scripts")


def test_exchanged_sides_are_noticed_in_a_set_in_a_corpus_and_in_single_pairs(check: Checks) -> None:
    right, wrong = sentences(900), [(target, source) for source, target in sentences(300, seed=5)]
    corpora = [{"name": "right", "files": check.write("a", right)}, {"name": "wrong", "files": check.write("b", wrong)}]
    found = check(corpora, check.write("valid", wrong[:40]))
    assert "reverse of corpus.train, right\n" in found.line("direction", 2)
    mixed = check(check.write("c", [*right, *wrong[:100]]), check.write("valid", wrong[:40]))
    assert "10.0% of the pairs look like the opposite one\n" in mixed.line("direction")
    assert "warning: exchange source and target of these pairs" in mixed.line("direction")
    one = check(check.write("d", right), check.write("valid", wrong[:40]))
    assert "are its files exchanged?" in one.line("direction", 2)


def test_the_same_language_on_both_sides_is_noticed(check: Checks) -> None:
    pairs = [(source, other) for (source, _), (other, _) in zip(sentences(900), sentences(900, seed=7), strict=True)]
    found = check(check.write("train", pairs), corpus={"vocabulary": {"size": 30}})
    assert "warning: source and target look alike" in found.line("languages")


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda files: os.remove(files[1]), r"train\.de: No such file"),
        (lambda files: Path(files[1]).write_text("one line\n", encoding="utf-8"), r"has 50 lines and .*has 1 line"),
        (lambda files: Path(files[0]).write_bytes(b"\xff\n" * 50), r"train\.en, line 1: not UTF-8"),
        (lambda files: Path(files[0]).write_text("w " * 500 + "\n" + "w\n" * 49, encoding="utf-8"), ""),
        (lambda files: Path(files[0]).write_text(("w " * 500 + "\n") * 50, encoding="utf-8"), r"would be left out"),
    ],
)  # fmt: skip
def test_what_prevents_training_is_one_sentence_and_status_2(check: Checks, break_it: Any, said: str) -> None:
    files = check.write("train", sentences(50))
    break_it(files)
    found = check(files, corpus={"vocabulary": {"size": 32}})
    assert found.status == (2 if said else 0), found.said
    assert re.search(said, found.said)
    assert ("Nothing prevents training" in found.page) == (not said)


def test_all_reasons_are_said_at_once_and_the_page_goes_on(check: Checks, monkeypatch: pytest.MonkeyPatch) -> None:
    files = check.write("train", sentences(400))
    monkeypatch.setattr(resources.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 10_000}))
    monkeypatch.setattr(device, "memory", lambda own, devices, ranks: 1000)
    found = check(files, corpus={"vocabulary": {"size": [3000, 4000]}})
    assert found.status == 2
    sizes = r"corpus.vocabulary.size: 3000 pieces .* for the source; corpus.vocabulary.size: 4000 pieces .* for the target"
    assert re.search(rf"error: 3 reasons prevent training:\n  {sizes}\n  model: its vectors .*\n  run: .* disk has", found.said)
    assert "another size stands for it" in found.line("vocabulary")
    assert "400, the same number of lines" in found.line("pairs")
    assert "about" in found.line("epoch")
    assert "Nothing prevents training" not in found.page


def test_a_vocabulary_that_is_too_small_is_no_reason_to_stop_either(check: Checks) -> None:
    found = check(check.write("train", sentences(400)), corpus={"vocabulary": {"size": 17}})
    assert (found.status, "17 pieces are fewer than the characters" in found.said) == (2, True)
    assert "reasons" not in found.said
    assert "about" in found.line("memory")


def test_all_corpora_that_cannot_be_read_are_named(check: Checks) -> None:
    good = check.write("good", sentences(50))
    found = check([{"files": good}, {"name": "b", "files": ["x", "y"]}, {"name": "c", "files": good[:1] * 3}], valid=["v", "w"])
    assert found.status == 2
    assert "3 reasons prevent training:" in found.said
    for key in ("corpus.train, b: x: No such file", "corpus.train, c: give [source, target]", "corpus.valid: v: No such file"):
        assert f"\n  {key}" in found.said


def test_no_room_on_the_disk_and_too_little_memory_prevent_training(check: Checks, monkeypatch: pytest.MonkeyPatch) -> None:
    files = check.write("train", sentences(50))
    with monkeypatch.context() as patch:
        patch.setattr(resources.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 10_000}))
        found = check(files)
        assert (found.status, "its disk has 0 MB free; free some space" in found.said) == (2, True), found.said
    monkeypatch.setattr(device, "memory", lambda own, devices, ranks: 1000)
    found = check(files)
    assert (found.status, "its vectors in mode single need" in found.said) == (2, True), found.said


def test_too_little_memory_for_a_batch_is_a_warning(check: Checks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "memory", lambda own, devices, ranks: 500e6)
    found = check(check.write("train", sentences(50)))
    assert found.status == 0
    assert "warning: lower batch.tokens, or choose a smaller model.preset" in found.line("memory")


def test_several_ranks_are_checked_without_being_started(check: Checks) -> None:
    found = check(
        check.write("train", sentences(400)), None, "--devices", "cpu x 2", "--mode", "sparse-local", "--local.every", "2"
    )
    assert found.status == 0, found.said
    assert "sparse-local on 2 x cpu" in found.line("mode")
    hosts = check.folder / "hosts"
    hosts.write_text("a slots=2\nb slots=2\n", encoding="utf-8")
    found = check(check.write("train", sentences(400)), None, "--hosts", str(hosts))
    assert "sync on 4 x cpu" in found.line("mode")


def test_under_a_launcher_it_says_how_to_start_it(check: Checks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    found = check(check.write("train", sentences(50)))
    assert (found.status, "start it without mpirun" in found.said) == (2, True), found.said


@pytest.mark.slow
def test_a_run_that_has_begun_continues_and_another_model_prevents_it(check: Checks) -> None:
    files = check.write("train", sentences(100))
    assert check(files).status == 0
    assert cli.run(train.command, ["--config", str(check.folder / "mine.yml")]) == 0
    found = check(files)
    assert found.status == 0, found.said
    assert "continues from" in found.line("run")
    assert "which exist already" in found.line("vocabulary")
    found = check(files, None, "--model.dim", "32")
    assert (found.status, "cannot change what it began with" in found.said) == (2, True)


def test_the_memory_of_a_batch_is_that_of_a_real_forward_pass(make: Any, vocabulary: Vocabulary, tmp_path: Path) -> None:
    settled: config.Config = make()
    stores = open_stores(settled.corpus, vocabulary, tmp_path)
    batch = Batches(stores, settled.corpus, settled.batch, vocabulary, 1).largest()
    model = Transformer(settled.model, len(vocabulary)).train()
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept.setdefault(storage.data_ptr(), storage)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model.states(batch.source, batch.source_mask, batch.target_in)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    real = sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in own)
    output = 4 * (hidden.numel() + 2 * batch.target_tokens * len(vocabulary) + len(vocabulary) * settled.model.dim)
    assert memory.of_batch(settled, len(vocabulary), batch) == pytest.approx(real + output, rel=0.02)


def test_vectors_and_checkpoints_have_the_bytes_of_their_elements(make: Any, vocabulary: Vocabulary) -> None:
    settled = make(mode="single", optimizer__name="adam")
    shapes = shapes_of(settled, vocabulary.size)
    elements = sum(torch.Size(shape).numel() for shape in shapes)
    needs = memory.of_vectors(settled, (0,), shapes)
    assert needs.checkpoint >= 4 * 3 * elements  # parameters and Adam's two moments
    assert needs.vectors >= 4 * 4 * elements  # and gradients
    assert needs.vectors < 4 * 7 * elements
