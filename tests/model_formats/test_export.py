"""Exported models: what the real packages read must be the model that was trained."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ctranslate2
import pytest
import sentencepiece
import torch
from models import random_batch, random_model
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from nmt_train import cli
from nmt_train.cli import export as command
from nmt_train.corpus import CorpusConfig
from nmt_train.corpus.batch import Batch
from nmt_train.corpus.text import read_lines
from nmt_train.corpus.train_vocabulary import train as train_vocabulary
from nmt_train.corpus.vocabulary import BEGIN, PAD, UNKNOWN, Vocabulary
from nmt_train.load_model import load_model
from nmt_train.model.beam_search import SearchConfig
from nmt_train.model.transformer import Transformer
from nmt_train.model.translator import Translator
from nmt_train.model_formats import SENTENCEPIECE, ctranslate, huggingface, tokenizer

SEARCH = SearchConfig(beam=5)
KINDS = [(norm, tied) for norm in ("pre", "post") for tied in ("all", "target-output", "none")]
MARIANS = {"activation": "swish", "output_bias": True}  # as the models of OPUS-MT have them
CONVENTIONS = {"conventions": "marian"}


@pytest.fixture(scope="module")
def wanted(trained: Path, demo: Path) -> list[str]:
    """Our translations of the test set."""
    return [hypotheses[0][0] for hypotheses in Translator(*ours(trained), SEARCH).stream(read_lines(demo / "test.en"))]


def lines(demo: Path) -> list[str]:
    ordinary = [*read_lines(demo / "train.en")][:200]
    return [*ordinary, "", "  two  spaces ", "Ünïcødé ﬁ x² ½ 你好", "a\tb", "▁▁ x"]


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, MARIANS])
@pytest.mark.parametrize(("norm", "tied"), KINDS)
def test_hugging_faces_logits_are_ours(
    tmp_path: Path, vocabulary: Vocabulary, norm: str, tied: str, more: dict[str, Any]
) -> None:
    model, batch = random_model(len(vocabulary), norm, tied, **more), random_batch(len(vocabulary))
    huggingface.write(model, vocabulary, SEARCH, tmp_path)
    theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    inputs = batch.target_in.clone()
    inputs[:, 0] = theirs.config.decoder_start_token_id
    with torch.inference_mode():
        found = theirs(input_ids=batch.source, attention_mask=(batch.source != PAD).long(), decoder_input_ids=inputs).logits
        wanted = logits_of(model, batch)
    exchanged = [BEGIN, UNKNOWN, PAD, *range(3, len(vocabulary))]
    filled = batch.target_out != PAD
    torch.testing.assert_close(found[filled][:, exchanged], wanted[filled], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_its_tokenizer_gives_our_ids_and_our_text(tmp_path: Path, demo: Path, kind: str) -> None:
    files = [str(demo / "train.en"), str(demo / "train.de")]
    parts = [{"files": files, "tag": tag} for tag in ("<2de>", "2de", "2de-at")]  # one tag is the beginning of another
    config = CorpusConfig(train=parts, valid=files, vocabulary={"size": 150, "type": kind})  # type: ignore[arg-type]
    vocabulary = train_vocabulary(config)
    tokenizer.write(vocabulary, tmp_path, "PreTrainedTokenizerFast", 100)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    texts = [*lines(demo), *(f"<2de> {line}" for line in lines(demo)), "in the <2de> middle", "<2de>", "2de-at six", "2de six"]
    ids = vocabulary.encode(texts)
    assert [found[:-1] for found in theirs(texts)["input_ids"]] == ids
    known = [line for line in ids if UNKNOWN not in line]  # theirs leaves out the unknown piece, ours shows it
    assert len(known) > 200
    assert theirs.batch_decode(known, skip_special_tokens=True) == vocabulary.decode(known)
    assert theirs.eos_token_id == theirs("x")["input_ids"][-1] == 3


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize(
    "normalization",
    [{"normalization_rule_name": "identity"}, {"remove_extra_whitespaces": False}, {"add_dummy_prefix": False}],
    ids=str,
)
def test_its_tokenizer_treats_spaces_as_the_users_vocabulary_does(demo: Path, kind: str, normalization: dict[str, Any]) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines(demo)), model_writer=model, vocab_size=100, model_type=kind, pad_id=0, unk_id=1, bos_id=2,
        eos_id=3, minloglevel=2, hard_vocab_limit=False, **normalization,
    )  # fmt: skip
    vocabulary = Vocabulary(model.getvalue(), "here")
    texts = [*lines(demo), "\tsix", "six\xa0", " six", "  six", "six  ", "six\n", "six▁", " ", "\u3000six \xa0 two"]
    theirs = tokenizer.convert(vocabulary)
    assert [theirs.encode(text).ids[:-1] for text in texts] == vocabulary.encode(texts)


@pytest.mark.slow
def test_hugging_face_translates_as_we_do(trained: Path, demo: Path, tmp_path: Path, wanted: list[str]) -> None:
    assert call(trained, tmp_path / "out", "--to", "huggingface") == 0
    sources = [*read_lines(demo / "test.en")]
    theirs, tokens = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path / "out")
    batch = tokens(sources, return_tensors="pt", padding=True, return_token_type_ids=False)
    found = tokens.batch_decode(theirs.generate(**batch), skip_special_tokens=True)
    assert found == wanted


@pytest.mark.parametrize("more", [{}, MARIANS, CONVENTIONS, MARIANS | CONVENTIONS])
@pytest.mark.parametrize(("norm", "tied"), KINDS)
def test_ctranslate2_scores_as_we_do(
    tmp_path: Path, vocabulary: Vocabulary, norm: str, tied: str, more: dict[str, Any]
) -> None:
    model, batch = random_model(len(vocabulary), norm, tied, **more), random_batch(len(vocabulary))
    ctranslate.write(model, vocabulary, None, tmp_path)
    source, target = (
        [[vocabulary.piece(i) for i in row if i > 3] for row in ids.tolist()] for ids in (batch.source, batch.target_out)
    )
    theirs = ctranslate2.Translator(str(tmp_path)).score_batch(source, target)
    with torch.inference_mode():
        logits = logits_of(model, batch)
    wanted = logits.log_softmax(-1).gather(2, batch.target_out[..., None]).squeeze(2)
    for row, found in enumerate(theirs):
        torch.testing.assert_close(torch.tensor(found.log_probs), wanted[row, : len(found.log_probs)], rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_hugging_face_has_the_attention_of_a_guided_head(tmp_path: Path, vocabulary: Vocabulary, norm: str) -> None:
    model, batch = random_model(len(vocabulary), norm, guided_alignment={"layer": 2}), random_batch(len(vocabulary))
    huggingface.write(model, vocabulary, SEARCH, tmp_path)
    theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, attn_implementation="eager")
    inputs = batch.target_in.clone()
    inputs[:, 0] = theirs.config.decoder_start_token_id
    mask = (batch.source != PAD).long()
    with torch.inference_mode():
        found = theirs(input_ids=batch.source, attention_mask=mask, decoder_input_ids=inputs, output_attentions=True)
        wanted = model.guided_attention(batch)
    filled = batch.target_out != PAD
    torch.testing.assert_close(found.cross_attentions[2 - 1][:, 0][filled], wanted[filled], rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [None, "int8", "bf16"])
def test_ctranslate2_translates_as_we_do(
    trained: Path, demo: Path, tmp_path: Path, wanted: list[str], quantize: str | None
) -> None:
    options = ["--quantize", quantize] if quantize else []
    assert call(trained, tmp_path / "out", "--to", "ctranslate2", *options) == 0
    found = ctranslated(tmp_path / "out", [*read_lines(demo / "test.en")])
    assert sum(map(str.__eq__, found, wanted)) >= (len(wanted) if quantize is None else 0.6 * len(wanted))


@pytest.mark.slow
def test_ctranslate2s_own_converter_understands_the_hugging_face_folder(
    trained: Path, demo: Path, tmp_path: Path, wanted: list[str]
) -> None:
    assert call(trained, tmp_path / "hf", "--to", "huggingface") == 0
    ctranslate2.converters.TransformersConverter(str(tmp_path / "hf")).convert(str(tmp_path / "ct2"))
    sources = [*read_lines(demo / "test.en")]
    tokens = AutoTokenizer.from_pretrained(tmp_path / "hf")
    pieces = [tokens.convert_ids_to_tokens(ids) for ids in tokens(sources)["input_ids"]]
    results = ctranslate2.Translator(str(tmp_path / "ct2")).translate_batch(
        pieces, beam_size=5, patience=4, length_penalty=1, disable_unk=True, suppress_sequences=[["<pad>"], ["<s>"]]
    )
    assert [tokens.decode(tokens.convert_tokens_to_ids(result.hypotheses[0])) for result in results] == wanted


@pytest.mark.slow
@pytest.mark.parametrize("target", ["huggingface", "ctranslate2"])
def test_the_readme_of_a_folder_runs_as_it_stands(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    out = tmp_path / "out"
    assert call(trained / "best-bleu", out, "--to", target) == 0
    text = (out / "README.md").read_text(encoding="utf-8")
    assert "`train.en`, `train.de`" in text
    assert "sacreBLEU signature `nrefs:1" in text
    program = text.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(out)
    capsys.readouterr()
    exec(program, {})
    assert capsys.readouterr().out.startswith("['")


@pytest.mark.slow
def test_the_mean_of_checkpoints_is_exported(trained: Path, tmp_path: Path) -> None:
    assert call(trained, tmp_path / "out", "--to", "huggingface", "--average", "2") == 0
    model, vocabulary = ours(trained, 2)
    theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").get_input_embeddings().weight
    assert torch.equal(theirs[4:], model.source_matrix[4:])
    assert "It is the mean of 2 checkpoints." in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert len(vocabulary) == len(theirs)


@pytest.mark.slow
def test_others_may_read_what_the_umask_allows(trained: Path, tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        assert call(trained, tmp_path / "out", "--to", "huggingface") == 0
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o644}


def test_transformers_4_cannot_load_what_it_would_get_wrong(tmp_path: Path, vocabulary: Vocabulary) -> None:
    for norm, tied in KINDS:
        folder = tmp_path / f"{norm}-{tied}"
        folder.mkdir()
        huggingface.write(random_model(len(vocabulary), norm, tied), vocabulary, SEARCH, folder)
        named = json.loads((folder / "tokenizer_config.json").read_text())["tokenizer_class"]
        with safe_open(folder / "model.safetensors", "pt") as file:
            known = named == "PreTrainedTokenizerFast", file.metadata() == {"format": "pt"}
        assert known == (norm == "post" or tied == "all",) * 2


@pytest.mark.slow
def test_mistakes_have_their_sentence_and_leave_nothing(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: Any) -> str:
        capsys.readouterr()
        assert call(*arguments) == 2
        return capsys.readouterr().err

    out = tmp_path / "out"
    assert "is for --to ctranslate2" in refused(trained, out, "--to", "huggingface", "--quantize", "int8")
    assert "does not exist" in refused(tmp_path / "nothing", out, "--to", "huggingface")
    assert "has 2 checkpoints, not the 9" in refused(trained, out, "--to", "huggingface", "--average", "9")
    damaged = shutil.copytree((trained / "last").resolve(), tmp_path / "damaged")
    with open(damaged / "parameters.safetensors", "r+b") as file:
        file.seek(2000)
        file.write(b"xxxx")
    assert "was changed since it was saved" in refused(damaged, out, "--to", "ctranslate2")
    taken = tmp_path / "file"
    taken.write_text("mine")
    assert "already exists; name a new folder" in refused(trained, taken, "--to", "ctranslate2")
    assert "Not a directory" in refused(trained, taken / "out", "--to", "huggingface")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "file"]


@pytest.mark.slow
def test_a_full_disk_has_its_sentence_and_leaves_nothing(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*arguments: Any) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(huggingface, "save_file", full)
    assert call(trained, tmp_path / "out", "--to", "huggingface") == 2
    assert "out: No space left on device; name a folder that can be written" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["tokenizers", "ctranslate2"])
def test_without_the_package_it_says_how_to_get_it(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    from nmt_train.model_formats import export

    monkeypatch.setattr(export.importlib.util, "find_spec", lambda name: None if name == missing else name)
    assert call(trained, tmp_path / "out", "--to", "huggingface" if missing == "tokenizers" else "ctranslate2") == 2
    assert f"{missing} not installed; pip install '.[export]'" in capsys.readouterr().err


def logits_of(model: Transformer, batch: Batch) -> Tensor:
    states = model.states(batch.source, batch.source_mask, batch.target_in)
    return torch.nn.functional.linear(states, model.output_matrix, model.prediction_bias)


def call(*arguments: Any) -> int:
    return cli.run(command.command, [str(argument) for argument in arguments])


def ours(path: Path, average: int = 1) -> tuple[Transformer, Vocabulary]:
    from nmt_train.run.folder import newest

    return load_model(newest(path, average), torch.device("cpu"))[:2]


def ctranslated(folder: Path, sources: Sequence[str]) -> list[str]:
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / SENTENCEPIECE))
    results = ctranslate2.Translator(str(folder)).translate_batch(
        pieces.encode(list(sources), out_type=str), beam_size=5, patience=4, length_penalty=1, disable_unk=True,
        suppress_sequences=[["<pad>"], ["<s>"]],
    )  # fmt: skip
    return [pieces.decode(result.hypotheses[0]) for result in results]
