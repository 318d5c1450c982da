"""Models of the real M2M100 class, with the tokenizers of M2M100 and NLLB: ours has one pair of their languages."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ctranslate2
import pytest
import torch
from conftest import Make, Once
from published import publish as publish_marian
from published_m2m100 import PAIRS, SPM, Published, publish
from safetensors.torch import load_file, save_file
from simulated import events, parameters
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from nmt_train import cli
from nmt_train.cli import export, import_model
from nmt_train.common.errors import UserError
from nmt_train.corpus.batch import Batch, assemble
from nmt_train.corpus.new_pieces import extended
from nmt_train.corpus.text import read_lines
from nmt_train.corpus.vocabulary import BEGIN, LANGUAGE, PAD, TARGET, UNKNOWN, Vocabulary
from nmt_train.load_model import load_model
from nmt_train.model.beam_search import SearchConfig
from nmt_train.model.transformer import Transformer
from nmt_train.model.translator import Translator
from nmt_train.model_formats import SENTENCEPIECE
from nmt_train.training.start import start

CPU = torch.device("cpu")
KINDS = [*PAIRS]
HERE = {"encoder_layers": 2, "decoder_layers": 2, "dim": 32, "ffn_dim": 48, "heads": 4, "conventions": "m2m100"}
ODD = ["two  spaces", "an unknown 字, and Ünïcødé ﬁ x"]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def theirs(demo: Path, once: Once, kind: str) -> Path:
    def fill(folder: Path) -> None:
        publish(demo, folder / "theirs", kind)
        imported(folder / "theirs", folder / "ours", kind)

    return once(kind, fill) / "theirs"


@pytest.fixture(scope="module")
def ours(theirs: Path) -> Path:
    return theirs.with_name("ours")


@pytest.fixture(scope="module")
def taught(demo: Path, once: Once, kind: str) -> tuple[Path, Path]:
    """Their model and ours, whose translations end by themselves."""

    def teach(folder: Path) -> None:
        without = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "dropout": 0.0, "attention_dropout": 0.0}
        real = Published(publish(demo, folder / "theirs", kind, **without), kind)
        real.teach([*zip(read(demo, "train.en"), read(demo, "train.de"), strict=True)], 240)
        real.model.save_pretrained(folder / "theirs")
        imported(folder / "theirs", folder / "ours", kind)

    folder = once(f"{kind}-taught", teach)
    return folder / "theirs", folder / "ours"


def read(demo: Path, name: str) -> list[str]:
    return [*read_lines(demo / name)]


def imported(folder: Path, out: Path, kind: str) -> Path:
    source, target = PAIRS[kind]
    assert call(import_model, folder, out, "--from", source, "--to", target) == 0
    return out


def call(command: Any, *arguments: Any) -> int:
    return cli.run(command.command, [str(argument) for argument in arguments])


def loaded(path: Path) -> tuple[Transformer, Vocabulary]:
    return load_model([path], CPU)[:2]


def batch_of(vocabulary: Vocabulary, sources: list[str], targets: list[str]) -> Batch:
    return assemble(
        [torch.tensor(ids, dtype=torch.long).numpy() for ids in vocabulary.encode(sources)],
        [torch.tensor(ids, dtype=torch.long).numpy() for ids in vocabulary.encode(targets, TARGET)],
    )


def logs_of(model: Transformer, batch: Batch) -> list[Tensor]:
    with torch.inference_mode():
        states = model.states(batch.source, batch.source_mask, batch.target_in)
        logs = torch.nn.functional.linear(states, model.output_matrix, model.prediction_bias).log_softmax(-1)
    return [row[filled] for row, filled in zip(logs, batch.target_out != PAD, strict=True)]


def translated(path: Path, sources: list[str], beam: int) -> list[str]:
    search = SearchConfig(beam=beam, normalization=0.0, length_extra=60)
    return [hypotheses[0][0] for hypotheses in Translator(*loaded(path), search).stream(sources)]


def test_sources_and_targets_have_their_embeddings_and_texts(theirs: Path, ours: Path, kind: str, demo: Path) -> None:
    real, (model, vocabulary) = Published(theirs, kind), loaded(ours)
    embeddings = real.model.get_input_embeddings().weight
    sources, targets = (ODD + read(demo, f"train.{language}")[:100] for language in ("en", "de"))
    source, target = PAIRS[kind]
    assert [vocabulary.piece(number).strip("_") for number in (LANGUAGE, BEGIN)] == [source, target]
    for lines, side, language in ((sources, 0, LANGUAGE), (targets, TARGET, BEGIN)):
        for line, ids in zip(lines, vocabulary.encode(lines, side), strict=True):
            wanted = real.batch([line], [line])["labels" if side else "input_ids"][0]
            assert torch.equal(model.target_embedding[[language, *ids, 3]], embeddings[wanted])
            if UNKNOWN not in ids:
                assert vocabulary.decode([ids]) == [real.text(wanted.tolist())]
    assert len(vocabulary) == len(embeddings)


def test_our_log_probabilities_are_theirs(theirs: Path, ours: Path, kind: str, demo: Path) -> None:
    real, (model, vocabulary) = Published(theirs, kind), loaded(ours)
    sources, targets = (ODD + read(demo, f"test.{language}") for language in ("en", "de"))
    batch = batch_of(vocabulary, sources, targets)
    place = rows(model, real)
    labels = real.batch(sources, targets)["labels"]
    wanted = real.logs(sources, targets)
    for found, logs in zip(logs_of(model, batch), wanted, strict=True):
        torch.testing.assert_close(found, logs[:, place], rtol=0, atol=1e-4)
    sums = [logs.gather(1, line[1 : len(logs) + 1, None]).sum() for logs, line in zip(wanted, labels, strict=True)]
    torch.testing.assert_close(model.log_probabilities(batch).detach(), torch.stack(sums), rtol=0, atol=1e-3)


def rows(model: Transformer, real: Published) -> Tensor:
    """For each of our pieces, the id of theirs with the same embedding."""
    same = (model.target_embedding.detach()[:, None] == real.model.get_input_embeddings().weight.detach()).all(2)
    assert same.any(1).all()
    return same.int().argmax(1)


@pytest.mark.slow
@pytest.mark.parametrize("beam", [1, 4])
def test_our_translations_are_theirs(taught: tuple[Path, Path], kind: str, demo: Path, beam: int) -> None:
    theirs, ours = taught
    sources = read(demo, "test.en")
    wanted = Published(theirs, kind).translate(sources, beam)
    assert len({*wanted}) > 10, "they say something"
    equal = sum(map(str.__eq__, translated(ours, sources, beam), wanted))
    assert equal >= (len(wanted) if beam == 1 else 0.9 * len(wanted))  # the beams end by different rules


@pytest.mark.slow
def test_it_is_fine_tuned_and_resumes_bit_for_bit(make: Make, ours: Path, tmp_path: Path) -> None:
    def tuned(name: str, after: str) -> Path:
        config = make(
            init=str(ours), corpus__vocabulary={}, stop__after=after, validation__every="10u",
            model={"dropout": 0.1},
        )  # fmt: skip
        assert start(dataclasses.replace(config, run=str(tmp_path / name)), False, False) == 0
        return tmp_path / name

    whole = tuned("whole", "20u")
    tuned("halves", "10u")
    assert parameters(tuned("halves", "20u")) == parameters(whole)
    scores = [event["cross-entropy"] for event in events(whole, "validation")]
    assert scores[0] > scores[1] > scores[2]


def test_other_conventions_are_refused(make: Make, ours: Path) -> None:
    with pytest.raises(UserError, match=r"needs model.conventions m2m100 \(here standard\); remove"):
        start(make(init=str(ours), model={"conventions": "standard"}), False, False)


def test_pieces_may_be_added(ours: Path) -> None:
    vocabulary = loaded(ours)[1]
    new = extended(vocabulary, ["<name>"])
    assert new.encode(["Six <name>."])[0].count(len(vocabulary)) == 1
    assert [new.piece(number) for number in range(len(vocabulary))] == [vocabulary.piece(i) for i in range(len(vocabulary))]


def test_half_precision_becomes_fp32(theirs: Path, ours: Path, kind: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(theirs, tmp_path / "half"))
    tensors = load_file(theirs / "model.safetensors")
    save_file({name: tensor.half() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    half, whole = (loaded(path)[0].state_dict() for path in (imported(folder, tmp_path / "out", kind), ours))
    assert all(torch.equal(tensor, whole[name].half().float()) for name, tensor in half.items())


def test_pieces_that_the_table_of_ids_lacks_are_split_into_known_ones(demo: Path, tmp_path: Path) -> None:
    folder = publish(demo, tmp_path / "theirs", "m2m100", lacking=["▁s", "en", "x"])
    real, (model, vocabulary) = Published(folder, "m2m100"), loaded(imported(folder, tmp_path / "ours", "m2m100"))
    embeddings = real.model.get_input_embeddings().weight
    assert len(vocabulary) == len(embeddings)
    lines = ["a 漢 that only the table has", *read(demo, "train.en")[:100], *read(demo, "train.de")[:100]]
    split, known = 0, {vocabulary.piece(number) for number in range(len(vocabulary))}
    for line, ids in zip(lines, vocabulary.encode(lines), strict=True):
        pieces = real.tokens.tokenize(line)
        assert max(ids) < len(vocabulary)
        if not {"▁s", "en"} & {*pieces}:
            wanted = real.batch([line], [line])["input_ids"][0]
            assert torch.equal(model.target_embedding[[LANGUAGE, *ids, 3]], embeddings[wanted])
        elif {*line.replace(" ", "▁")} <= known:
            assert vocabulary.decode([ids]) == [line]
            split += 1
    assert split > 0
    longer = extended(vocabulary, ["<name>"])
    assert longer.encode(["six <name>"])[0][-1] == len(longer) - 1


@pytest.mark.slow
def test_hugging_face_gets_it_back_as_a_model_of_one_pair(taught: tuple[Path, Path], demo: Path, tmp_path: Path) -> None:
    ours = taught[1]
    out = tmp_path / "out"
    assert call(export, ours, out, "--to", "huggingface", "--beam", 4, "--normalization", 0) == 0
    real, tokens = AutoModelForSeq2SeqLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert type(real).__name__ == "M2M100ForConditionalGeneration"
    model, vocabulary = loaded(ours)
    sources, targets = (read(demo, f"test.{language}") for language in ("en", "de"))
    batch = batch_of(vocabulary, sources, targets)
    given = tokens(sources, return_tensors="pt", padding=True, return_token_type_ids=False)
    inputs = torch.nn.functional.pad(batch.target_in, (1, 0), value=3)
    with torch.inference_mode():
        logs = real(**given, decoder_input_ids=inputs).logits.log_softmax(-1)[:, 1:]
    order = [1, 0, *range(2, len(vocabulary))]
    for row, filled, wanted in zip(logs, batch.target_out != PAD, logs_of(model, batch), strict=True):
        torch.testing.assert_close(row[filled][:, order], wanted, rtol=0, atol=1e-4)
    found = tokens.batch_decode(real.generate(**given), skip_special_tokens=True)
    assert sum(map(str.__eq__, found, translated(ours, sources, 4))) >= 0.9 * len(found)  # the beams end by different rules


@pytest.mark.slow
def test_ctranslate2_translates_it_as_we_do(taught: tuple[Path, Path], demo: Path, tmp_path: Path) -> None:
    ours = taught[1]
    out = tmp_path / "out"
    assert call(export, ours, out, "--to", "ctranslate2") == 0
    vocabulary = loaded(ours)[1]
    sources, pieces = read(demo, "test.en"), Vocabulary((out / SENTENCEPIECE).read_bytes(), "here")
    language, begin = vocabulary.piece(LANGUAGE), vocabulary.piece(BEGIN)
    results = ctranslate2.Translator(str(out)).translate_batch(
        [[language, *line] for line in pieces.segment(sources)], target_prefix=[[begin]] * len(sources), beam_size=1,
        disable_unk=True, suppress_sequences=[["<pad>"]],
    )  # fmt: skip
    assert [pieces.decode_with(_ids(pieces, result.hypotheses[0]), []) for result in results] == translated(ours, sources, 1)


def _ids(vocabulary: Vocabulary, pieces: list[str]) -> list[int]:
    table = {vocabulary.piece(number): number for number in range(len(vocabulary))}
    return [table[piece] for piece in pieces]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["huggingface", "ctranslate2"])
def test_the_readme_of_an_exported_folder_runs_as_it_stands(
    taught: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    out = tmp_path / "out"
    assert call(export, taught[1], out, "--to", target, "--beam", 1) == 0
    program = (out / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(out)
    capsys.readouterr()
    exec(program, {})
    said = capsys.readouterr().out
    assert said.startswith("['")
    assert not any(language in said for language in (*PAIRS["nllb"], "__"))


def test_marian_cannot_have_it(ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(export, ours, tmp_path / "out", "--to", "marian") == 2
    assert "--to marian: Marian has other sinusoids" in capsys.readouterr().err


def spoiled(name: str, **values: Any) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))

    return change


def without(*names: str) -> Callable[[Path], Any]:
    return lambda folder: [(folder / name).unlink() for name in names]


@pytest.mark.parametrize(
    ("kinds", "spoil", "said"),
    [
        (KINDS, without(SPM), f"{SPM}: No such file or directory; copy it from the model that this one was fine-tuned from"),
        (KINDS, lambda folder: (folder / SPM).write_bytes(b"xx"), f"{SPM}: not a SentencePiece model"),
        (KINDS, without("model.safetensors"), "has neither model.safetensors nor pytorch_model.bin"),
        (KINDS, spoiled("config.json", scale_embedding=False), "scale_embedding is False; only models with True can be read"),
        (KINDS, spoiled("config.json", pad_token_id=0), "pad_token_id is 0; only models with 1 can be read"),
        (KINDS, spoiled("config.json", vocab_size=100), "do not fit vocab_size of config.json, 100; give the files"),
        (KINDS, spoiled("config.json", vocab_size=999), "model.shared.weight is missing, or is not one vector of 32 per piece"),
        (KINDS, spoiled("config.json", vocab_size=None), "vocab_size is None, not the number of embeddings"),
        (KINDS, spoiled("config.json", encoder_layers=5), "a parameter is missing"),
        (KINDS, spoiled("config.json", encoder_layers=1), "describes another model than the weights are of"),
        (KINDS, spoiled("config.json", model_type="nllb-moe"), "is a mixture of experts, which cannot be read; give a dense"),
        (
            KINDS,
            spoiled("config.json", model_type="t5"),
            "model_type is 't5'; only marian, and m2m_100 (M2M100, NLLB) can be read",
        ),
        (["m2m100"], spoiled("vocab.json", six=4), "vocab.json: not the table of an M2M100 model: it needs <s>, <pad>"),
        (["m2m100"], spoiled("tokenizer_config.json", language_codes="x"), "language_codes is 'x'; only m2m100 and wmt21"),
        (["m2m100"], without("vocab.json"), "has neither vocab.json (as M2M100 has), nor tokenizer.json"),
        (["nllb"], without("tokenizer.json", "tokenizer_config.json"), "has neither vocab.json (as M2M100 has), nor tokenizer"),
        (["nllb"], spoiled("tokenizer.json", added_tokens=[1]), "tokenizer.json: not of a tokenizer of Hugging Face"),
        (["nllb"], spoiled("tokenizer_config.json", legacy_behaviour=True), "its sources end with their language; only models"),
    ],
)
def test_a_damaged_or_foreign_folder_has_its_sentence(
    theirs: Path, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], kinds: list[str], spoil: Any, said: str
) -> None:
    if kind not in kinds:
        return
    folder = Path(shutil.copytree(theirs, tmp_path / "copy"))
    spoil(folder)
    source, target = PAIRS[kind]
    assert call(import_model, folder, tmp_path / "out", "--from", source, "--to", target) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_languages_are_checked(theirs: Path, kind: str, demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(folder: Path, *options: str) -> str:
        assert call(import_model, folder, tmp_path / "out", *options) == 2
        return capsys.readouterr().err

    source, target = PAIRS[kind]
    some = "has 100 languages (af, am, ar, ...)" if kind == "m2m100" else "has 5 languages (ace_Arab, deu_Latn, eng_Latn, ...)"
    for options in ([], ["--from", source], ["--to", target]):
        assert f"{some}; choose two of them with --from and --to" in said(theirs, *options)
    near = {"m2m100": ("eng", "en"), "nllb": ("eng", "eng_Latn")}[kind]
    assert f"--from: the model has no language {near[0]}; did you mean {near[1]}" in said(
        theirs, "--from", near[0], "--to", target
    )
    assert "--to: the model has no language %%; it has" in said(theirs, "--from", source, "--to", "%%")
    assert f"--from and --to: both are {source}; choose two" in said(theirs, "--from", source, "--to", source)
    if kind == "nllb":
        other = publish_marian(demo, tmp_path / "marian")
        assert "is no M2M100 or NLLB model, whose languages they choose" in said(other, "--from", source)


@pytest.mark.parametrize("given", ["tokenizer.json", "tokenizer_config.json"])
def test_the_languages_of_nllb_are_in_either_file_of_the_tokenizer(demo: Path, tmp_path: Path, given: str) -> None:
    folder = publish(demo, tmp_path / "theirs", "nllb")
    if given == "tokenizer_config.json":  # as older versions of the real package wrote it
        added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
        decoder = {str(token["id"]): {"content": token["content"]} for token in added}
        spoiled("tokenizer_config.json", added_tokens_decoder=decoder)(folder)
        (folder / "tokenizer.json").unlink()
    vocabulary = loaded(imported(folder, tmp_path / "ours", "nllb"))[1]
    assert [vocabulary.piece(number) for number in (BEGIN, LANGUAGE)] == ["deu_Latn", "eng_Latn"]
