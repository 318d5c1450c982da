from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from nmt_train import config as configuration
from nmt_train.cli import train as train_command
from nmt_train.common.errors import UserError
from nmt_train.config import entries, load, plain, validate
from nmt_train.config_text import to_yaml

MINIMAL = "corpus:\n  train: [a.en, a.de]\n  valid: [b.en, b.de]\nstop:\n  after: 10u\n"


def write(folder: Path, text: str) -> str:
    path = folder / "run.yml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_the_command_line_overrides_later_files_which_override_earlier_ones_which_override_defaults(tmp_path: Path) -> None:
    first = write(tmp_path, MINIMAL + "seed: 2\nbatch: {tokens: 100, accumulate: 4}\n")
    second = tmp_path / "second.yml"
    second.write_text("batch: {tokens: 300}\n", encoding="utf-8")
    config = load([first, str(second)], {"optimizer.learning_rate": "3e-4", "seed": "7", "stop.after": "[1h, 5e]"})
    assert (config.batch.tokens, config.batch.accumulate, config.seed) == (300, 4, 7)
    assert config.optimizer.learning_rate == 3e-4
    assert [str(span) for span in config.stop.after] == ["1h", "5e"]
    assert config.log.every.amount == 100


@pytest.mark.parametrize(
    ("addition", "sentence"),
    [
        ("optimiser: {name: adam}", "line 6: unknown key optimiser.name; did you mean optimizer.name?"),
        ("optimizer:\n  learnig_rate: 1", "line 7: unknown key optimizer.learnig_rate; did you mean optimizer.learning_rate?"),
        ("batch:\n  tokens: many", "line 7: batch.tokens: it should be a whole number, or auto, not 'many'"),
        ("batch:\n  tokens: 0", "line 7: batch.tokens: it should be greater than or equal to 1, or auto, not '0'"),
        ("model: {preset: huge}", "line 6: model.preset: it should be 'tiny', 'small', 'base' or 'big', or auto, not 'huge'"),
        ("model: {dim: 100, heads: 3}", "dim 100 is not a multiple of heads 3"),
        ("log: {every: 5}", "line 6: log.every: '5' is not a duration"),
        ("optimizer:\n  warmup: 2e", "line 7: optimizer.warmup: 2e is not a number of updates; write it as 16000 or 16Ku"),
        ("optimizer: {async_warmup: 2h}", "line 6: optimizer.async_warmup: 2h is not a number of updates; write it as 16000"),
        ("optimizer: {step_every: 0}", "line 6: optimizer.step_every: it should be greater than or equal to 1"),
        ("seed: 1\nseed: 2", "line 7: seed is given twice"),
        ("recovery:\n  - {every: true, every: false}", "line 7: recovery.every is given twice"),
        ("seed: [1", "not YAML"),
        ("run: &r {x: *r}", "nested too deeply, or contains itself"),
        ("stop.after: 5u", "line 6: stop.after: in a file, keys are nested, not dotted: write `after:` below `stop:`"),
        ("optimizer: {learning_rate: .inf}", "optimizer.learning_rate"),
        ("validation: {metrics: []}", "line 6: validation.metrics"),
        ("seed: 99999999999999999999999", "line 6: seed"),
        ("model: 5", "line 6: model is a section"),
        ("5", "line"),
    ],
)
def test_a_mistake_is_answered_with_file_line_key_and_remedy(tmp_path: Path, addition: str, sentence: str) -> None:
    path = write(tmp_path, MINIMAL + addition + "\n")
    with pytest.raises(UserError) as caught:
        load([path], {})
    assert sentence in str(caught.value)
    assert path in str(caught.value)


def test_values_are_taken_as_they_are_written_whatever_yaml_would_make_of_them(tmp_path: Path) -> None:
    for name in ("1.10", "3:10", "0x10", "1_000", "2026-01-01", "2026-99-99", "no", "~x"):
        assert load([write(tmp_path, MINIMAL + f"run: {name}\n")], {}).run == name
        assert load([write(tmp_path, MINIMAL)], {"run": name}).run == name
    assert load([write(tmp_path, MINIMAL)], {"run": "runs/exp #2", "init": "null"}).run == "runs/exp #2"
    assert load([write(tmp_path, MINIMAL)], {"trace": "true", "validation.every": "null", "devices": "[0]"}).devices == [0]


def test_patience_without_validations_and_no_end_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^command line: stop\.patience needs validations, but validation\.every is null"):
        load([write(tmp_path, MINIMAL + "validation: {every: null}\n")], {"stop.patience": "2"})
    with pytest.raises(UserError, match=r"command line: stop\.after"):
        load([write(tmp_path, MINIMAL)], {"stop.after": "[]"})


def test_of_contradicting_keys_the_first_is_found_where_it_was_set(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="^command line: model: dim 18 is not a multiple of heads 4"):
        load([write(tmp_path, MINIMAL + "model: {heads: 4}\n")], {"model.dim": "18"})


def test_a_validation_set_has_metrics_if_any_are_given(tmp_path: Path) -> None:
    corpus = {"train": ["a", "b"], "valid": [{"files": ["a", "b"]}, {"files": ["a", "b"], "name": "news", "metrics": []}]}
    with pytest.raises(UserError, match=r"corpus\.valid.*metrics"):
        validate({"corpus": corpus, "run": "x"}, {})


def test_a_file_in_the_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = Path(write(tmp_path, MINIMAL + "run: mine\n"))
    assert load([f"~/{path.name}"], {}).run == "mine"


@pytest.mark.parametrize("text", ["16000", "16000u", "16Ku"])
def test_numbers_of_updates_may_have_their_unit(tmp_path: Path, text: str) -> None:
    keys = f"warmup: {text}, async_warmup: {text}, step_every: {text}"
    optimizer = load([write(tmp_path, f"{MINIMAL}optimizer: {{{keys}}}\n")], {}).optimizer
    assert (optimizer.warmup, optimizer.async_warmup, optimizer.step_every) == (16_000,) * 3


def test_a_missing_required_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"corpus\.valid is missing"):
        load([write(tmp_path, "corpus: {train: [a, b]}\nstop: {after: 1u}\n")], {})


def test_mistakes_on_the_command_line_say_so() -> None:
    with pytest.raises(UserError, match=r"command line: unknown key optimizer\.lr"):
        train_command.command(["--optimizer.lr", "1"])
    with pytest.raises(UserError, match=r"command line: batch\.tokens: it should be a whole number, or auto"):
        load([], {"batch.tokens": "x", "corpus.train": "[a, b]", "corpus.valid": "[a, b]", "stop.after": "1u"})
    with pytest.raises(UserError, match="did you mean corpus.max_length"):
        train_command.command(["--corpus.max_lenght", "1"])


def test_a_missing_or_binary_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="absent.yml: No such file"):
        load([str(tmp_path / "absent.yml")], {})
    (tmp_path / "binary.yml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8"):
        load([str(tmp_path / "binary.yml")], {})


def test_the_printed_configuration_is_whole_commented_and_reads_back_as_itself(tmp_path: Path) -> None:
    config = load([write(tmp_path, MINIMAL + "model: {preset: tiny, dropout: 0.25}\n")], {})
    text = to_yaml(config)
    assert load([write(tmp_path, text)], {}) == config
    for entry in entries():
        if not isinstance(entry, str):
            assert f"# {entry.description}\n" in text, entry.name
    assert config.model.dim == 128, "sizes come from the preset"
    assert config.model.dropout == 0.25, "what is given overrides the preset"


def test_every_key_is_described_and_help_lists_it_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_command.command(["--help", "all"])
    text = " ".join(capsys.readouterr().out.split())
    for entry in entries():
        if not isinstance(entry, str):
            assert entry.description, entry.name
            assert f"--{entry.name} " in text
    assert "(default: 2048)" in text
    assert text.count("required") >= 3


def test_the_names_that_are_promised_exist() -> None:
    promised = """run seed corpus.train corpus.valid corpus.vocabulary.size corpus.max_length model.preset batch.tokens
    batch.sentences optimizer.name optimizer.learning_rate mode devices validation.every validation.metrics checkpoint.every
    checkpoint.keep stop.after log.every trace""".split()
    assert set(promised) <= set(configuration.leaves())


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yml")), ids=lambda path: path.name)
def test_every_config_that_is_shipped_is_valid(path: Path) -> None:
    config = load([str(path)], {})
    assert yaml.safe_load(to_yaml(config)) == plain(config)
