"""Models of the real MarianMT classes, read as ours: the same ids, logits and texts; and written again, the same bits."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ctranslate2
import pytest
import sentencepiece
import torch
from conftest import Make
from models import random_model
from published import publish
from safetensors.torch import load_file
from simulated import events
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from nmt_train import cli
from nmt_train.cli import export, import_model
from nmt_train.common.errors import UserError
from nmt_train.corpus.batch import assemble
from nmt_train.corpus.text import read_lines
from nmt_train.corpus.vocabulary import BEGIN, END, PAD, TARGET
from nmt_train.load_model import load_model
from nmt_train.model.beam_search import SearchConfig
from nmt_train.model.translator import Translator
from nmt_train.model_formats import huggingface
from nmt_train.training.start import start

SIZES_HERE = {"encoder_layers": 2, "decoder_layers": 2, "dim": 32, "ffn_dim": 48, "heads": 4}
LINES = [">>deu<< Six past seven.", "Six past seven.", "two  spaces and an unknown 漢", ""]


@pytest.fixture(scope="module")
def theirs(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(demo, tmp_path_factory.mktemp("marian") / "theirs")


@pytest.fixture(scope="module")
def ours(theirs: Path) -> Path:
    out = theirs.with_name("ours")
    assert cli.run(import_model.command, [str(theirs), str(out)]) == 0
    return out


def compare_logits(theirs: Path, ours: Path, demo: Path) -> None:
    model, vocabulary, _ = load_model([ours], torch.device("cpu"))
    tokens, other = AutoTokenizer.from_pretrained(theirs), AutoModelForSeq2SeqLM.from_pretrained(theirs)
    sources, targets = ([*read_lines(demo / f"test.{language}")][:4] for language in ("en", "de"))
    found = tokens(sources, text_target=targets, return_tensors="pt", padding=True)
    batch = assemble(
        [torch.tensor(ids).numpy() for ids in vocabulary.encode(sources)],
        [torch.tensor(ids).numpy() for ids in vocabulary.encode(targets, TARGET)],
    )
    with torch.inference_mode():
        labels = found["labels"].masked_fill(found["labels"] == -100, other.config.pad_token_id)
        wanted = other(input_ids=found["input_ids"], attention_mask=found["attention_mask"], labels=labels).logits
        states = model.states(batch.source, batch.source_mask, batch.target_in)
        logits = torch.nn.functional.linear(states, model.output_matrix, model.output_bias)
    table = tokens.get_vocab()
    place = [table[vocabulary.piece(i)] for i in range(len(vocabulary)) if i not in (PAD, BEGIN)]
    kept = [i for i in range(len(vocabulary)) if i not in (PAD, BEGIN)]
    filled = batch.target_out != PAD
    torch.testing.assert_close(logits[filled][:, kept], wanted[filled][:, place], rtol=0, atol=1e-4)
    torch.testing.assert_close(logits[filled].log_softmax(-1)[:, END], wanted[filled].log_softmax(-1)[:, 0], rtol=0, atol=1e-4)


def test_ids_and_texts_are_those_of_their_tokenizer(theirs: Path, ours: Path, demo: Path) -> None:
    vocabulary = load_model([ours], torch.device("cpu"))[1]
    tokens = AutoTokenizer.from_pretrained(theirs)
    sources, targets = (LINES + [*read_lines(demo / f"train.{language}")][:100] for language in ("en", "de"))
    names = {number: name for name, number in tokens.get_vocab().items()}
    for lines, side in ((sources, {}), (targets[1:], {"text_target": targets[1:]})):
        wanted = tokens(lines, **side)["labels"] if side else tokens(lines)["input_ids"]
        ids = vocabulary.encode(lines, TARGET if side else 0)
        assert [[vocabulary.piece(i) for i in line] for line in ids] == [[names[i] for i in line[:-1]] for line in wanted]
    kept = [line for line in wanted if tokens.unk_token_id not in line]
    kept_ids = [line for line in ids if 1 not in line]
    assert vocabulary.decode(kept_ids) == tokens.batch_decode(kept, skip_special_tokens=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation_function": "relu"},
        {"share_encoder_decoder_embeddings": False},
        {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
    ],
)
def test_their_logits_are_ours_and_come_back_bit_for_bit(demo: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs = publish(demo, tmp_path / "theirs", **changes)
    assert cli.run(import_model.command, [str(theirs), str(tmp_path / "ours")]) == 0
    compare_logits(theirs, tmp_path / "ours", demo)
    assert cli.run(export.command, [str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "huggingface"]) == 0
    first, second = (load_file(folder / "model.safetensors") for folder in (theirs, tmp_path / "back"))
    assert all(torch.equal(first[name], second[name]) for name in first if "embed_positions" not in name)
    for name in ("vocab.json", "source.spm", "target.spm"):
        read: Callable[[bytes], Any] = json.loads if name.endswith("json") else bytes
        assert read((theirs / name).read_bytes()) == read((tmp_path / "back" / name).read_bytes())
    before, after = (AutoModelForSeq2SeqLM.from_pretrained(folder) for folder in (theirs, tmp_path / "back"))
    loaded = {name: value for name, value in before.state_dict().items() if "embed_positions" not in name}  # ours are longer
    assert all(torch.equal(value, after.state_dict()[name]) for name, value in loaded.items())


def test_weights_in_pytorchs_form_are_read_too(theirs: Path, ours: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(theirs, tmp_path / "pickled"))
    torch.save(load_file(copy / "model.safetensors"), copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    assert cli.run(import_model.command, [str(copy), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "parameters.safetensors").read_bytes() == (ours / "parameters.safetensors").read_bytes()


def test_ctranslate2_translates_it_as_we_do(ours: Path, demo: Path, tmp_path: Path) -> None:
    assert cli.run(export.command, [str(ours), str(tmp_path / "out"), "--to", "ctranslate2"]) == 0
    model, vocabulary, _ = load_model([ours], torch.device("cpu"))
    sources = [*read_lines(demo / "test.en")][:5]
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "out" / "source.spm"))
    scored = ctranslate2.Translator(str(tmp_path / "out")).score_batch(pieces.encode(sources, out_type=str), [["▁"]] * 5)
    for source, found in zip(sources, scored, strict=True):
        batch = assemble(
            [torch.tensor(vocabulary.encode([source])[0]).numpy()], [torch.tensor(vocabulary.encode(["▁"], TARGET)[0]).numpy()]
        )
        if len(found.log_probs) == batch.target_out.shape[1]:
            with torch.inference_mode():
                assert sum(found.log_probs) == pytest.approx(float(model.log_probabilities(batch)[0]), abs=1e-3)
    assert len(list(Translator(model, vocabulary, SearchConfig(beam=2)).stream(sources))) == 5


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["single", "sparse-overlap"])
def test_it_is_fine_tuned_from_where_it_is(make: Make, ours: Path, tmp_path: Path, mode: str) -> None:
    config = make(
        init=str(ours), mode=mode, corpus__vocabulary={}, stop__after="30u", validation__every="15u",
        optimizer__learning_rate=0.003, model={},
    )  # fmt: skip
    assert start(dataclasses.replace(config, run=str(tmp_path / "run")), False, False) == 0
    scores = [event["cross-entropy"] for event in events(tmp_path / "run", "validation")]
    assert len(scores) == 3
    assert scores[0] > scores[1] > scores[2]
    history = json.loads((tmp_path / "run" / "last" / "checkpoint.json").read_text())["history"]
    assert [sorted(step) for step in history] == [["imported", "parameters"], ["init", "parameters", "updates"]]


def test_sizes_that_do_not_fit_are_named(make: Make, ours: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"needs model.dim 32 \(here 64\), model.activation swish \(here relu\); remove"):
        start(make(init=str(ours), model={"dim": 64, "activation": "relu"}), False, False)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json: No such file or directory"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json: not a JSON object"),
        (lambda folder: changed(folder, model_type="t5"), "model_type is 't5'; only marian, and m2m_100"),
        (lambda folder: changed(folder, normalize_before=True), "normalize_before is True"),
        (lambda folder: changed(folder, d_model=64), "is not one vector of 64 per piece"),
        (lambda folder: changed(folder, decoder_ffn_dim=7), "encoder_ffn_dim and decoder_ffn_dim differ"),
        (lambda folder: changed(folder, encoder_layers=5), "a parameter is missing"),
        (lambda folder: changed(folder, encoder_layers=1), "describes another model than the weights are of"),
        (lambda folder: changed(folder, encoder_ffn_dim=7, decoder_ffn_dim=7), "does not fit config.json"),
        (
            lambda folder: changed(folder, encoder_layers="x"),
            "not the configuration of a model that can be read: it should be a whole number",
        ),
        (lambda folder: (folder / "vocab.json").write_text('{"a": 0, "b": 0}'), "not the table of a MarianMT model"),
        (
            lambda folder: (folder / "vocab.json").write_text('{"</s>": "0", "<unk>": "1", "<pad>": "2"}'),
            "not the table of a MarianMT model",
        ),
        (lambda folder: (folder / "source.spm").write_bytes(b"xx"), "not a SentencePiece model"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"xx"), "its weights cannot be read"),
        (lambda folder: (folder / "target_vocab.json").write_text("{}"), "source and target have ids of their own"),
        (
            lambda folder: pointer(folder),
            "(UnpicklingError); download them again, or run git lfs pull",
        ),
        (lambda folder: (folder / "model.safetensors").unlink(), "has neither model.safetensors nor pytorch_model.bin"),
    ],
)
def test_a_damaged_or_foreign_folder_has_its_sentence(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], Any], said: str
) -> None:
    folder = Path(shutil.copytree(theirs, tmp_path / "copy"))
    spoil(folder)
    assert cli.run(import_model.command, [str(folder), str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_leaves_again_says_where_it_comes_from_and_searches_as_asked(ours: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert cli.run(export.command, [str(ours), str(out), "--to", "huggingface", "--beam", "1", "--normalization", "0.5"]) == 0
    settings = json.loads((out / "generation_config.json").read_text(encoding="utf-8"))
    assert (settings["num_beams"], settings["length_penalty"]) == (1, 0.5)
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "which another program has trained" in card
    assert "- imported from `theirs" in card
    assert "training corpus" not in card


def test_only_codes_that_the_model_has_are_codes(ours: Path) -> None:
    vocabulary = load_model([ours], torch.device("cpu"))[1]
    for text in (">>xyz<< six", ">>> six << seven", ">> six <<"):
        assert {*vocabulary.encode(["six"])[0]} <= {*vocabulary.encode([text])[0]}, "a text like a code is not swallowed"
    assert vocabulary.unknown_code(">>xyz<< Six.") == ">>xyz<<"
    for text in (">>deu<< Six.", "Six.", ">>> six << seven"):
        assert vocabulary.unknown_code(text) == ""
    assert [vocabulary.knows(tag) for tag in ("", ">>deu<<", ">>xyz<<")] == [True, True, False]


def test_translating_tells_which_lines_have_an_unknown_code(ours: Path) -> None:
    model, vocabulary, _ = load_model([ours], torch.device("cpu"))
    translator = Translator(model, vocabulary, SearchConfig(beam=1))
    assert len(list(translator.stream([">>deu<< Six.", ">>xyz<< Six.", "Six.", ">>abc<< Six."], window=3))) == 4
    assert translator.unknown_codes == [2, 4]


def test_a_tag_that_the_model_does_not_know_is_refused(make: Make, ours: Path, demo: Path) -> None:
    part = {"files": [str(demo / "train.en"), str(demo / "train.de")], "tag": ">>xyz<<"}
    config = make(
        init=str(ours), corpus__train=[part], corpus__valid=[part], corpus__vocabulary={},
        model={**SIZES_HERE, "norm": "post", "activation": "swish", "output_bias": True},
    )  # fmt: skip
    with pytest.raises(UserError, match=r"corpus.valid: tag >>xyz<< is unknown to the vocabulary of this run; choose one"):
        start(config, False, False)


def pointer(folder: Path) -> None:
    """What git clone leaves without Git LFS."""
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 300\n")


def test_a_pre_norm_model_with_two_sentencepiece_models_has_no_form_in_transformers(ours: Path, tmp_path: Path) -> None:
    vocabulary = load_model([ours], torch.device("cpu"))[1]
    with pytest.raises(UserError, match="transformers has no tokenizer with two SentencePiece models for a pre-norm model"):
        huggingface.write(random_model(len(vocabulary), "pre"), vocabulary, SearchConfig(), tmp_path)


def test_sampled_segmentations_are_refused_before_training(make: Make, ours: Path, tmp_path: Path) -> None:
    config = make(
        init=str(ours), corpus__vocabulary={"sampling": 0.2},
        model={**SIZES_HERE, "norm": "post", "activation": "swish", "output_bias": True},
    )  # fmt: skip
    with pytest.raises(
        UserError, match=r"corpus.vocabulary.sampling: needs one SentencePiece model of type unigram for both sides"
    ):
        start(config, False, False)


def changed(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
