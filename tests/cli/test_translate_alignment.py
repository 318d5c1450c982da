"""Word alignments from training to translations, on an artificial language pair whose alignments are known."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import pytest
import sentencepiece
import torch
from aligned import Pair, corpus, pairs
from alignment_quality import quality
from conftest import Once, small
from hand_aligned import SENTENCES, align

from nmt_train import cli, config
from nmt_train.cli import plot, translate
from nmt_train.corpus.batch import assemble
from nmt_train.corpus.vocabulary import TARGET, Vocabulary
from nmt_train.load_model import load_model
from nmt_train.model.transformer import Transformer
from nmt_train.model.word_alignment import Aligner, Links, Sentence, hard
from nmt_train.model_formats import ctranslate
from nmt_train.report.alignment import figure
from nmt_train.training.start import start

pytestmark = pytest.mark.slow


def artificial(demo: Path, folder: Path) -> dict[str, Any]:
    return small(demo, folder / "run") | {"corpus": corpus(folder, 3000)}


def trained_with(values: dict[str, Any], weight: float) -> Path:
    values |= {"stop": {"after": "400u"}, "batch": {"tokens": 1000}}
    values["model"] = {"encoder_layers": 2, "decoder_layers": 2, "dim": 64, "ffn_dim": 128, "heads": 2, "dropout": 0.0}
    values["model"]["guided_alignment"] = {"layer": 1, "weight": weight}
    values["optimizer"] = {"learning_rate": 0.004, "warmup": 100}
    assert start(config.validate(values, {}), False, False) == 0
    return Path(values["run"])


@pytest.fixture(scope="module")
def run(demo: Path, once: Once) -> Path:
    return once("guided", lambda folder: trained_with(artificial(demo, folder), 0.5)) / "run"


@pytest.fixture
def translated(monkeypatch: pytest.MonkeyPatch, capfdbinary: Any) -> Any:
    def call(text: str, *arguments: object) -> tuple[int, list[str], str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        capfdbinary.readouterr()
        status = cli.run(translate.command, [str(argument) for argument in arguments])
        out, err = (stream.decode() for stream in capfdbinary.readouterr())
        return status, out.split("\n")[:-1], err

    return call


def links(text: str) -> set[tuple[int, int]]:
    return {(int(source), int(target)) for source, _, target in (link.partition("-") for link in text.split())}


def sentences(vocabulary: Vocabulary, lines: list[str], side: int) -> list[Sentence]:
    return [Sentence(line, np.array(ids)) for line, ids in zip(lines, vocabulary.encode(lines, side), strict=True)]


def found_in(run: Path, test: list[Pair]) -> list[Links]:
    """The links that the model of a run finds between sources and their given translations."""
    model, vocabulary, _ = load_model([run / "last"], torch.device("cpu"))
    sides = [sentences(vocabulary, [pair[side] for pair in test], side) for side in (0, TARGET)]
    return [hard(soft) for soft in Aligner(model, vocabulary).soft(*sides)]


def test_at_least_95_percent_of_the_links_are_right(run: Path) -> None:
    test = pairs(200, 3)
    truth = [links(pair[2]) for pair in test]
    guided = quality([*map(set, found_in(run, test))], truth, truth)
    assert guided.precision >= 0.95
    assert guided.recall >= 0.95
    assert guided.error <= 0.05


def test_hard_alignments_follow_the_translations(run: Path, translated: Any) -> None:
    test = pairs(100, 4)
    status, lines, _ = translated("".join(f"{pair[0]}\n" for pair in test), "--model", run, "--alignment", "hard")
    assert status == 0
    right = [line for line, (_, target, truth) in zip(lines, test, strict=True) if line == f"{target} ||| {sort(truth)}"]
    assert len(right) >= 80
    plain = translated("".join(f"{pair[0]}\n" for pair in test), "--model", run)[1]
    assert [line.split(" ||| ")[0] for line in lines] == plain


def sort(truth: str) -> str:
    return " ".join(f"{source}-{target}" for source, target in sorted(links(truth)))


def test_soft_alignments_have_a_row_for_each_word_of_the_translation_and_one_for_its_end(run: Path, translated: Any) -> None:
    lines = translated("".join(f"{pair[0]}\n" for pair in pairs(20, 5)), "--model", run, "--alignment", "soft")[1]
    for line, (source, *_) in zip(lines, pairs(20, 5), strict=True):
        text, _, matrix = line.partition(" ||| ")
        rows = [[float(weight) for weight in row.split(",")] for row in matrix.split(" ")]
        assert len(rows) == len(text.split()) + 1
        assert {len(row) for row in rows} == {len(source.split()) + 1}
        assert [sum(row) for row in rows] == pytest.approx([1.0] * len(rows), abs=1e-4)


def test_every_translation_of_an_n_best_list_has_its_alignment(run: Path, translated: Any) -> None:
    given = ["--model", run, "--n-best", 3, "--beam", 3, "--window", 2]
    text = "".join(f"{pair[0]}\n" for pair in pairs(5, 6)) + "\n"
    lines = [line.split(" ||| ") for line in translated(text, *given, "--alignment", "hard")[1]]
    plain = [line.split(" ||| ") for line in translated(text, *given)[1]]
    assert [[*line[:2], *line[3:]] for line in lines] == plain
    assert lines[-1][:3] == ["5", "", ""], "of an empty line"
    for line in lines:
        assert sorted(target for _, target in links(line[2])) == [*range(len(line[1].split()))]


def test_pieces_of_the_translation_are_aligned_with_those_of_the_source(run: Path, translated: Any) -> None:
    test, vocabulary = pairs(50, 13), load_model([run / "last"], torch.device("cpu"))[1]
    text = "".join(f"{pair[0]}\n" for pair in test)
    plain = translated(text, "--model", run)[1]
    lines, soft = (translated(text, "--model", run, "--pieces", "--alignment", kind)[1] for kind in ("hard", "soft"))
    right = found = 0
    for line, matrix, whole, (source, _, truth) in zip(lines, soft, plain, test, strict=True):
        pieces = line.partition(" ||| ")[0].split(" ")
        assert "".join(pieces).replace("▁", " ").strip() == whole
        sides = [vocabulary.segment([source])[0], pieces]
        assert {len(row.split(",")) for row in matrix.partition(" ||| ")[2].split(" ")} == {len(sides[0]) + 1}
        words = [np.cumsum([piece.startswith("▁") for piece in side]) - 1 for side in sides]
        its = links(line.partition(" ||| ")[2])
        assert sorted(target for _, target in its) == [*range(len(pieces))]
        right += sum((int(words[0][source]), int(words[1][target])) in links(truth) for source, target in its)
        found += len(its)
    assert right / found > 0.9


def test_an_empty_line_has_an_empty_alignment_and_spaces_and_tags_count_as_in_the_line(run: Path, translated: Any) -> None:
    source = pairs(1, 7)[0][0]
    lines = translated(f"\n{source}\n  {source.replace(' ', '   ')} \n", "--model", run, "--alignment", "hard")[1]
    assert lines[0] == " ||| "
    assert lines[1] == lines[2]


def test_an_ensemble_has_the_mean_of_its_alignments(run: Path, translated: Any) -> None:
    text = "".join(f"{pair[0]}\n" for pair in pairs(5, 8))
    once, twice = (translated(text, "--model", *[run] * count, "--alignment", "soft")[1] for count in (1, 2))
    values = [np.array([float(value) for line in lines for value in line.partition(" ||| ")[2].replace(" ", ",").split(",")])
              for lines in (once, twice)]  # fmt: skip
    np.testing.assert_allclose(*values, atol=1e-4)


@pytest.fixture(scope="module")
def plain(demo: Path, run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a guided head, with the same vocabulary."""
    folder = tmp_path_factory.mktemp("plain")
    values = small(demo, folder / "run")
    values["corpus"]["vocabulary"] = {"path": str(run / "vocabulary.model")}
    values["corpus"] |= {"train": corpus(folder, 100)["train"][0]["files"], "valid": values["corpus"]["valid"]}
    assert start(config.validate(values, {}), False, False) == 0
    return Path(values["run"])


def test_models_without_a_guided_head_are_refused(plain: Path, run: Path, translated: Any) -> None:
    for models in ([plain], [run, plain]):
        status, lines, said = translated("bami\n", "--model", *models, "--alignment", "soft")
        assert (status, lines) == (2, [])
        assert "--alignment needs a model, or models, with a guided attention head; train one with" in said


def test_a_plot_without_a_guided_head_is_refused(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(plot.command, ["alignment", str(plain), "bami"]) == 2
    assert "has no guided attention head; train with model.guided_alignment.layer" in capsys.readouterr().err


def test_the_head_is_found_after_training_without_alignments(run: Path, demo: Path, tmp_path: Path, translated: Any) -> None:
    values = json.loads(json.dumps(small(demo, tmp_path / "more"))) | {"init": str(run), "stop": {"after": "2u"}}
    values["model"] = {}
    values["optimizer"] = {"learning_rate": 1e-6}
    del values["corpus"]["vocabulary"]
    assert start(config.validate(values, {}), False, False) == 0
    text = "".join(f"{pair[0]}\n" for pair in pairs(20, 9))
    before, after = (translated(text, "--model", its, "--alignment", "hard")[1] for its in (run, tmp_path / "more"))
    assert sum(map(str.__eq__, before, after)) >= 18


def test_ctranslate2_gives_the_attention_of_the_head(run: Path, tmp_path: Path) -> None:
    model, vocabulary, _ = load_model([run / "last"], torch.device("cpu"))
    assert isinstance(model, Transformer)
    ctranslate.write(model, vocabulary, None, tmp_path)
    theirs, pieces = ctranslate2.Translator(str(tmp_path)), sentencepiece.SentencePieceProcessor(model_proto=vocabulary.model)
    source = pairs(1, 10)[0][0]
    result = theirs.translate_batch([pieces.encode(source, out_type=str)], beam_size=1, return_attention=True)[0]
    ids = np.array(pieces.encode(source)), np.array(pieces.piece_to_id(result.hypotheses[0]))
    with torch.inference_mode():
        ours = model.guided_attention(assemble([ids[0]], [ids[1]]))[0].numpy()
    found = np.array(result.attention[0])
    np.testing.assert_allclose(found, ours[: len(found), : found.shape[1]], atol=1e-4)
    assert found.shape[1] >= len(ids[0])


def test_on_sentences_aligned_by_hand_the_error_is_low_after_training_with_a_simple_aligner(demo: Path, tmp_path: Path) -> None:
    lines = [*zip(*((demo / f"train.{side}").read_text(encoding="utf-8").splitlines() for side in ("en", "de")), strict=True)]
    alignments = tmp_path / "alignments"
    alignments.write_text(
        "".join(" ".join(f"{one}-{other}" for one, other in sorted(its)) + "\n" for its in align(lines)), encoding="utf-8"
    )
    values = small(demo, tmp_path / "run")
    values["corpus"]["train"] = [{"files": values["corpus"]["train"], "alignments": str(alignments)}]
    run = trained_with(values, 0.5)
    found = quality(
        [*map(set, found_in(run, [sentence[:3] for sentence in SENTENCES]))],
        [links(sure) for _, _, sure, _ in SENTENCES], [links(possible) for *_, possible in SENTENCES],
    )  # fmt: skip
    assert found.error < 0.25, found


@pytest.mark.parametrize("ending", [".png", ".svg"])
def test_a_plot_shows_the_words_of_a_translation_and_of_its_source(run: Path, tmp_path: Path, ending: str) -> None:
    source, target, _ = pairs(1, 11)[0]
    for name in ("a", "b"):
        assert cli.run(plot.command, ["alignment", str(run), source, "--output", str(tmp_path / f"{name}{ending}")]) == 0
    first, second = ((tmp_path / f"{name}{ending}").read_bytes() for name in ("a", "b"))
    assert first == second
    axes = figure(source, target, np.zeros((len(target.split()) + 1, len(source.split()) + 1))).axes[0]
    shown = [[label.get_text() for label in labels] for labels in (axes.get_xticklabels(), axes.get_yticklabels())]
    assert shown == [[*source.split(), "(end)"], [*target.split(), "(end)"]]


def test_a_plot_of_an_empty_sentence_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(plot.command, ["alignment", str(run), " "]) == 2
    assert "the sentence is empty; give a line to translate" in capsys.readouterr().err


def test_translations_with_prefixes_and_copied_characters_are_aligned_by_their_words(
    run: Path, tmp_path: Path, translated: Any
) -> None:
    (source, target, _), *_ = pairs(1, 12)
    begin = target.split()[0]
    (tmp_path / "prefix").write_text(f"{begin}  \n{begin} \n", encoding="utf-8")
    given = ["--model", run, "--prefix", tmp_path / "prefix", "--unknown", "copy", "--alignment", "hard"]
    lines = translated(f"{source}\n{source} 字\n", *given)[1]
    for line in lines:
        text, _, alignment = line.partition(" ||| ")
        assert text.startswith(f"{begin} ")
        assert sorted(target for _, target in links(alignment)) == [*range(len(text.split()))]
    assert (len(source.split()) - 1, 0) in links(lines[0].partition(" ||| ")[2])
