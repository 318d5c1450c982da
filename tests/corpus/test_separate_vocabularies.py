"""A vocabulary for each language: ids, embeddings and SentencePiece models of their own, in training and after it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import pytest
import sentencepiece
import torch
from conftest import Make, Once, small
from models import random_model
from simulated import events, run
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from nmt_train import cli
from nmt_train import config as configuration
from nmt_train.cli import export, validate
from nmt_train.common.errors import UserError
from nmt_train.corpus.batch import assemble
from nmt_train.corpus.batches import Batches
from nmt_train.corpus.data_shard import DataShard, Position
from nmt_train.corpus.noise import Noise
from nmt_train.corpus.store import open_stores
from nmt_train.corpus.text import read_lines
from nmt_train.corpus.train_vocabulary import train
from nmt_train.corpus.vocabulary import BEGIN, PAD, SOURCE, TARGET, UNKNOWN, SeparateVocabularies, Vocabulary
from nmt_train.load_model import load_model
from nmt_train.model.beam_search import SearchConfig
from nmt_train.model.translator import Translator
from nmt_train.model_formats import ctranslate, huggingface
from nmt_train.training.start import start

SIZES = [90, 110]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def separate(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    values = small(demo, tmp_path_factory.mktemp("separate") / "run")
    values["corpus"]["vocabulary"] = {"size": SIZES, "user_defined": ["<name>"]}
    return train(configuration.validate(values, {}).corpus)


def test_each_language_has_the_pieces_of_its_own_text(separate: Vocabulary, demo: Path) -> None:
    assert separate.size == SIZES
    for side, language in ((SOURCE, "en"), (TARGET, "de")):
        lines = [*read_lines(demo / f"train.{language}")][:100]
        ids = separate.encode(lines, side)
        assert separate.of(side).decode(ids) == lines
        assert max(map(max, ids)) < SIZES[side]
        assert len(separate.of(side).encode(["six <name> ok"])[0]) < len("six <name> ok"), "a symbol is one piece"
    assert separate.decode(separate.encode(["zwei Kisten"], TARGET)) == ["zwei Kisten"]
    assert UNKNOWN in separate.encode(["Tür ü ß"], SOURCE)[0], "the source's vocabulary has no German letters"


def test_unknown_characters_are_named_on_each_side_and_put_back_into_the_target(separate: Vocabulary) -> None:
    text = "zwei 漢字"
    assert separate.unknown([text], TARGET) == [["漢字"]]
    assert separate.unknown(["Tür"], SOURCE)[0][-1].startswith("ü")
    assert separate.decode_with(separate.encode([text], TARGET)[0], ["漢字"]) == text


def test_it_is_the_same_after_saving_and_from_a_file_for_each(separate: Vocabulary, tmp_path: Path) -> None:
    assert Vocabulary.read(separate.model, "here").digest == separate.digest
    paths = [str(tmp_path / name) for name in ("source.model", "target.model")]
    for path, model in zip(paths, separate.models, strict=True):
        Path(path).write_bytes(model)
    assert Vocabulary.load(paths).digest == separate.digest


def test_a_damaged_file_has_its_sentence(separate: Vocabulary) -> None:
    for damaged in (separate.model[:-9], separate.model[:60], separate.model.replace(b"target", b"tar")):
        with pytest.raises(UserError, match="here: .*(damaged|not a SentencePiece model)"):
            Vocabulary.read(damaged, "here")


@pytest.mark.parametrize("changes", [{"sampling": 0.3}, {"noise": Noise(typos=1, upper=0.5)}])
def test_changed_segmentations_and_noise_stay_on_their_side(
    separate: Vocabulary, make: Make, tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = make(corpus__vocabulary={"size": SIZES, "sampling": changes.get("sampling", 0)}).corpus
    part = {"files": config.train, "noise": changes.get("noise")}
    config = dataclasses.replace(config, train=[part], cache=str(tmp_path))  # type: ignore[list-item]
    batches = Batches(open_stores(config, separate, tmp_path), config, make().batch, separate, 1)
    for turn in islice(batches.stream(DataShard(0, 1), Position()), 3):
        assert turn.batch is not None
        for side, ids in ((SOURCE, turn.batch.source), (TARGET, turn.batch.target_out)):
            rows = [[i for i in row if i > 3] for row in ids.tolist()]
            again = separate.encode(separate.of(side).decode(rows), side)
            plain = separate.of(side).decode(again)
            assert plain == separate.of(side).decode(rows)
            assert rows != again or "noise" in changes


def test_the_source_is_not_tied_unless_that_is_given_and_then_it_is_refused(make: Make) -> None:
    assert make().model.tied == "all"
    assert make(corpus__vocabulary={"size": SIZES}).model.tied == "target-output"
    assert make(corpus__vocabulary={"size": SIZES}, model__tied="none").model.tied == "none"
    with pytest.raises(UserError, match="model.tied all would share one matrix"):
        start(make(corpus__vocabulary={"size": SIZES}, model__tied="all"), False, False)


@pytest.mark.parametrize(
    ("size", "said"),
    [([90], "at least 2 items"), ([90, 100, 110], "at most 2 items"), ([90, 5], "16, not 5"), ("many", "number, not 'many'")],
)
def test_sizes_are_one_number_or_two(make: Make, size: Any, said: str) -> None:
    with pytest.raises(UserError, match=f"corpus.vocabulary.size: .*{said}"):
        make(corpus__vocabulary={"size": size})


def test_too_many_pieces_for_one_language_are_refused_by_its_name(make: Make) -> None:
    with pytest.raises(UserError, match=r"corpus.vocabulary.size: 50000 pieces are more .* or less for the target"):
        train(make(corpus__vocabulary={"size": [90, 50000]}).corpus)


@pytest.fixture(scope="module")
def trained(demo: Path, once: Once) -> Path:
    """A run with separate vocabularies that translates a little; norm post, so that both exports can say it."""
    return once("separate", lambda folder: train_separate(demo, folder)) / "run"


def train_separate(demo: Path, folder: Path) -> None:
    values = small(demo, folder / "run")
    values["corpus"]["vocabulary"] = {"size": SIZES}
    values["model"] |= {"dim": 64, "ffn_dim": 128, "norm": "post"}
    values |= {"optimizer": {"learning_rate": 0.005, "warmup": 50}, "stop": {"after": "300u"}}
    values["validation"] = {"every": "100u", "metrics": ["cross-entropy"]}
    assert start(configuration.validate(values, {}), False, False) == 0


@pytest.mark.slow
def test_a_run_learns_translates_and_continues(
    trained: Path, demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = [event["cross-entropy"] for event in events(trained, "validation")]
    assert scores[-1] < 0.6 * scores[0]
    assert "90 + 110 pieces" in (trained / "train.log").read_text(encoding="utf-8")
    model, _, _ = load_model([trained / "last"], CPU)
    assert (model.source_matrix.shape[0], model.output_matrix.shape[0]) == (90, 110)
    assert model.output_matrix is model.target_embedding
    assert len(translations(trained, demo)) == 20
    capsys.readouterr()
    assert cli.run(validate.command, [str(trained), "--metrics", "cross-entropy"]) == 0
    assert f"{scores[-1]:.4f}" in capsys.readouterr().out
    copy = shutil.copytree(trained, tmp_path / "run", symlinks=True)
    again = configuration.load([str(trained / "config.yml")], {"run": str(copy), "stop.after": "310u"})
    assert start(again, False, False) == 0
    assert json.loads((copy / "last" / "checkpoint.json").read_text())["optimizer"]["updates"] == 310


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "low-bit", "powersgd", "sparse-overlap", "sparse-local", "strom"])
def test_several_workers_train_with_it(make: Make, tmp_path: Path, mode: str) -> None:
    folder = run(
        make, tmp_path / "run", [1, 1], mode=mode, stop__after="30u", validation__every="10u",
        corpus__vocabulary={"size": SIZES},
    )  # fmt: skip
    scores = [event["cross-entropy"] for event in events(folder, "validation")]
    assert scores[-1] < scores[0]


@pytest.mark.slow
def test_fine_tuning_begins_with_both(make: Make, trained: Path, tmp_path: Path) -> None:
    sizes = {"dim": 64, "ffn_dim": 128, "norm": "post", "encoder_layers": 1, "decoder_layers": 1, "heads": 2}
    config = make(init=str(trained), model=sizes, corpus__vocabulary={}, validation__every="3u")
    assert start(dataclasses.replace(config, run=str(tmp_path / "fine")), False, False) == 0
    before = [event["cross-entropy"] for event in events(trained, "validation") if event["update"] == 300]
    assert events(tmp_path / "fine", "validation")[0]["cross-entropy"] == pytest.approx(before[0], rel=0.05)
    with pytest.raises(UserError, match=r"init: .* needs model.tied target-output \(here all\)"):
        start(make(init=str(trained), model={**sizes, "tied": "all"}, corpus__vocabulary={}), False, False)


def translations(folder: Path, demo: Path) -> list[str]:
    model, vocabulary, _ = load_model([folder / "last"], CPU)
    found = Translator(model, vocabulary, SearchConfig(beam=5)).stream(read_lines(demo / "test.en"))
    return [hypotheses[0][0] for hypotheses in found]


def batch_of(vocabulary: Vocabulary, demo: Path) -> Any:
    source, target = (
        [np.array(ids) for ids in vocabulary.encode([*read_lines(demo / f"test.{language}")][:4], side)]
        for side, language in ((SOURCE, "en"), (TARGET, "de"))
    )
    return assemble(source, target)


@pytest.mark.parametrize("tied", ["target-output", "none"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_ctranslate2_scores_as_we_do(separate: Vocabulary, demo: Path, tmp_path: Path, norm: str, tied: str) -> None:
    model, batch = random_model(SIZES, norm, tied), batch_of(separate, demo)
    ctranslate.write(model, separate, None, tmp_path)
    sides = [sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / f"{side}.spm")) for side in ("source", "target")]
    pieces = [
        side.encode([*read_lines(demo / f"test.{language}")][:4], out_type=str)
        for side, language in zip(sides, ("en", "de"), strict=True)
    ]
    with torch.inference_mode():
        wanted = model.log_probabilities(batch).tolist()
    found = ctranslate2.Translator(str(tmp_path)).score_batch(*pieces)
    assert [sum(each.log_probs) for each in found] == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("tied", ["target-output", "none"])
def test_hugging_faces_logits_are_ours_for_a_post_norm_model(
    separate: Vocabulary, demo: Path, tmp_path: Path, tied: str
) -> None:
    model, batch = random_model(SIZES, "post", tied, output_bias=True), batch_of(separate, demo)
    huggingface.write(model, separate, SearchConfig(), tmp_path)
    theirs, tokens = AutoModelForSeq2SeqLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    sources, targets = ([*read_lines(demo / f"test.{language}")][:4] for language in ("en", "de"))
    inputs = tokens(sources, text_target=targets, return_tensors="pt", padding=True)
    with torch.inference_mode():
        labels = inputs["labels"].masked_fill(inputs["labels"] == -100, theirs.config.pad_token_id)
        found = theirs(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], labels=labels).logits
        states = model.states(batch.source, batch.source_mask, batch.target_in)
        wanted = torch.nn.functional.linear(states, model.output_matrix, model.output_bias)
    table = json.loads((tmp_path / "target_vocab.json").read_text(encoding="utf-8"))
    ours = [number for number in range(SIZES[TARGET]) if number not in (PAD, BEGIN)]
    place = [table[separate.of(TARGET).piece(number)] for number in ours]
    filled = batch.target_out != PAD
    torch.testing.assert_close(found[filled][:, place], wanted[filled][:, ours], rtol=0, atol=1e-4)


def test_hugging_face_has_no_form_for_it_in_a_pre_norm_model(separate: Vocabulary, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="transformers has no tokenizer with two SentencePiece models for a pre-norm model"):
        huggingface.write(random_model(SIZES, "pre", "none"), separate, SearchConfig(), tmp_path)


@pytest.mark.slow
def test_what_is_exported_translates_as_we_do(trained: Path, demo: Path, tmp_path: Path) -> None:
    for target in ("ctranslate2", "huggingface"):
        assert cli.run(export.command, [str(trained), str(tmp_path / target), "--to", target]) == 0
    ours = translations(trained, demo)
    folder = tmp_path / "huggingface"
    tokens, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder)
    sources = [*read_lines(demo / "test.en")]
    made = model.generate(**tokens(sources, return_tensors="pt", padding=True), max_new_tokens=40)
    theirs = tokens.batch_decode(made, skip_special_tokens=True)
    assert sum(map(str.__eq__, theirs, ours)) >= 0.9 * len(ours)
    source, target_side = (
        sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "ctranslate2" / f"{side}.spm"))
        for side in ("source", "target")
    )
    results = ctranslate2.Translator(str(tmp_path / "ctranslate2")).translate_batch(
        source.encode(sources, out_type=str), beam_size=5, patience=4, length_penalty=1, disable_unk=True,
        suppress_sequences=[["<pad>"], ["<s>"]],
    )  # fmt: skip
    found = [target_side.decode(result.hypotheses[0]) for result in results]
    assert sum(map(str.__eq__, found, ours)) >= 0.9 * len(ours)


def test_the_pieces_of_a_pair_are_of_one_kind(separate: Vocabulary) -> None:
    assert isinstance(separate, SeparateVocabularies)
    with pytest.raises(UserError, match="here: not a SentencePiece model"):
        SeparateVocabularies.join(separate, separate, "here")
