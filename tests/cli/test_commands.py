"""The console commands as a user calls them: what they print, and the one sentence for every mistake."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
import torch
import yaml
from conftest import ROOT, small

from nmt_train import cli, config
from nmt_train.cli import plot, simulate, train, translate, validate
from nmt_train.common.errors import TRY_AGAIN, UserError
from nmt_train.run import checkpoint

CLUSTERS = ROOT / "configs" / "clusters"


@pytest.fixture(scope="module")
def run(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short, traced run with two checkpoints."""
    values = small(demo, tmp_path_factory.mktemp("commands") / "run")
    values |= {"trace": True, "stop": {"after": "8u"}, "checkpoint": {"every": "4u"}, "log": {"every": "2u"}}
    values["validation"] = {"every": "4u", "metrics": ["cross-entropy", "bleu"]}
    path = Path(values["run"]).with_suffix(".yml")
    path.write_text(json.dumps(values), encoding="utf-8")
    assert cli.run(train.command, ["--config", str(path)]) == 0
    return Path(values["run"])


def call(command: Any, *arguments: Any, stdin: bytes = b"", monkeypatch: pytest.MonkeyPatch | None = None) -> int:
    if monkeypatch is not None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    return cli.run(command.command, [str(argument) for argument in arguments])


@pytest.mark.slow
def test_several_config_files_are_no_repetition(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.yml"
    other.write_text("mode: sync\n", encoding="utf-8")
    assert call(train, "--config", run.with_suffix(".yml"), "--config", other, "--print-config") == 0
    assert "mode: sync\n" in capsys.readouterr().out


def test_a_missing_file_is_named_with_the_place_where_it_was_looked_for(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = ["no.en", "no.en"]
    both = {"files": [f"{demo}/train.en", f"{demo}/train.de"]}
    for key, name, value in (
        ("corpus.train", "corpus.train", files),
        ("corpus.train, new", "corpus.train", [both, {"files": files, "name": "new"}]),
        ("corpus.train: sentence_weights", "corpus.train", [{**both, "sentence_weights": "no.en"}]),
        ("corpus.train: alignments", "corpus.train", [{**both, "alignments": "no.en"}]),
        ("corpus.valid, new", "corpus.valid", [both, {"files": files, "name": "new"}]),
        ("corpus.vocabulary.path", "corpus.vocabulary", {"path": "no.en"}),
    ):
        guided = {"model.guided_alignment": {"layer": 1}} if "alignments" in key else {}
        assert cli.run(train.command, prepare(demo, tmp_path, {name: value, **guided})) == 2
        assert f"error: {key}: no.en: No such file or directory ({tmp_path}/no.en); " in capsys.readouterr().err
    assert call(train, "--config", "no.en") == 2
    assert f"no.en: No such file or directory ({tmp_path}/no.en); " in capsys.readouterr().err


def test_print_config_prints_what_would_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run.with_suffix(".yml")
    assert call(train, "--config", path, "--print-config", "--batch.tokens", "777", "--trace") == 0
    printed = capsys.readouterr().out
    assert "  tokens: 777\n" in printed
    assert "trace: true\n" in printed
    assert "# " in printed


def test_validate_prints_a_row_per_checkpoint_with_signatures(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(validate, run, run / "last", "--beam", 2) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"checkpoint +update +cross-entropy +perplexity +bleu +chrf", lines[0])
    assert [line.split()[1] for line in lines[1:4]] == ["4", "8", "8"]
    assert any(line.startswith("bleu: nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:") for line in lines)
    assert any(line.startswith("chrf: nrefs:1|case:mixed") for line in lines)


def test_validate_json_averages_and_takes_any_test_set(run: Path, demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    test = [demo / "test.en", demo / "test.de"]
    assert call(validate, run, "--average", 2, "--test", *test, "--json", "--metrics", "chrf", "perplexity") == 0
    (row,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert row["averaged"] == 2
    assert {"chrf", "perplexity", "signatures"} <= row.keys()
    assert "bleu" not in row
    assert list(row["signatures"]) == ["chrf"]


def test_validates_bleu_is_sacrebleus_on_translates_output(
    run: Path, demo: Path, capfdbinary: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call(validate, run / "last", "--test", demo / "test.en", demo / "test.de", "--json") == 0
    row = json.loads(capfdbinary.readouterr().out)
    assert call(translate, "--model", run, stdin=(demo / "test.en").read_bytes(), monkeypatch=monkeypatch) == 0
    translations = capfdbinary.readouterr().out.decode().split("\n")[:-1]
    references = (demo / "test.de").read_text(encoding="utf-8").split("\n")[:-1]
    assert sacrebleu.corpus_bleu(translations, [references]).score == pytest.approx(row["bleu"], abs=1e-6)
    assert sacrebleu.corpus_chrf(translations, [references]).score == pytest.approx(row["chrf"], abs=1e-6)


def comet(page: str) -> str:
    """The command that a page gives as validation.command."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (block,) = [block for block in re.findall(r"(?s)```yaml\n(.*?)```", text) if "command:" in block]
    return str(yaml.safe_load(block)["validation"]["command"])


@pytest.fixture
def comet_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for COMET's command, which prints as that one does; its score is the number of lines, divided by 100."""
    script = tmp_path / "bin" / "comet-score"
    script.parent.mkdir()
    script.write_text(
        f"#!{sys.executable}\n"
        "import argparse\n"
        "parser = argparse.ArgumentParser()\n"
        "for name in '-s', '-t', '-r':\n"
        "    parser.add_argument(name, required=True)\n"
        "parser.add_argument('--only_system', action='store_true', required=True)\n"
        "given = parser.parse_args()\n"
        "source, translations, reference = (open(name).read().splitlines() for name in (given.s, given.t, given.r))\n"
        "assert len(source) == len(translations) == len(reference)\n"
        "print('Predicting: 100%')\n"
        "print(f'{given.t}\\tscore: {len(source) / 100:.4f}')\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.usefixtures("comet_score")
def test_comet_is_measured_by_the_command_of_the_documents(run: Path, demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = len((demo / "test.en").read_text(encoding="utf-8").splitlines())
    test = ["--test", demo / "test.en", demo / "test.de", "--metrics", "ter", "--beam", 1, "--command", comet("corpora.md")]
    assert call(validate, run / "last", *test, "--json") == 0
    assert json.loads(capsys.readouterr().out)["command"] == lines / 100
    assert call(validate, run / "last", *test) == 0
    head, row, *_ = capsys.readouterr().out.splitlines()
    assert head.split() == ["checkpoint", "update", "ter", "command"]
    assert row.split()[-1] == f"{lines / 100:.4f}"


def test_a_command_that_gives_no_score_is_an_error_of_validate(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [run / "last", "--metrics", "bleu", "--beam", 1, "--command", "echo no model; exit 3"]
    assert call(validate, *arguments) == 2
    assert re.search(r"error: --command: .*: exit status 3: no model; it should print the score", capsys.readouterr().err)
    assert call(validate, run, run, "--compare", "--command", "echo 1") == 2
    assert "--command is for the table; leave out --compare and --score" in capsys.readouterr().err


def lines_of(capfdbinary: Any) -> list[bytes]:
    return capfdbinary.readouterr().out.split(b"\n")


def test_translate_gives_one_line_per_line_in_order_whatever_is_in_them(
    run: Path, capfdbinary: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentences = [
        b"twelve",
        b"",
        b"The train leaves at four o'clock.",
        b"   ",
        "漢字 \u2028 \x85".encode(),
        b"a\x00b",
        b"six",
    ] * 3
    assert call(translate, "--model", run, stdin=b"\n".join(sentences), monkeypatch=monkeypatch) == 0
    together = lines_of(capfdbinary)
    assert len(together) == len(sentences) + 1
    assert together[1] == together[3] == b""
    assert (
        call(
            translate, "--model", run, "--window", 2, "--batch-tokens", 1, stdin=b"\n".join(sentences), monkeypatch=monkeypatch
        )
        == 0
    )
    assert lines_of(capfdbinary) == together, "neither window nor batches change a translation"


@pytest.mark.parametrize("command", [translate, validate])
def test_a_model_that_is_not_finite_is_said_to_be(
    run: Path, demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    saved = checkpoint.load(run / "last")
    tensors = {name: tensor * float("nan") for name, tensor in saved.tensors("parameters").items()}
    facts = {key: value for key, value in saved.facts.items() if key not in ("format", "vocabulary", "files")}
    checkpoint.save(tmp_path / "8", {"parameters": tensors}, facts, saved.vocabulary())
    arguments = (
        ["--model"] if command is translate else ["--metrics", "chrf", "--test", demo / "test.en", demo / "test.de", "--"]
    )
    assert call(command, *arguments, tmp_path / "8", stdin=b"twelve\n", monkeypatch=monkeypatch) == 2
    said = capsys.readouterr().err
    assert re.search(r"error: (.*/8: )?the model gives no probabilities: its parameters are not finite", said), said


def test_n_best_lists_are_numbered_and_sorted(run: Path, capfdbinary: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(translate, "--model", run, "--n-best", 3, stdin=b"twelve\nsix\n", monkeypatch=monkeypatch) == 0
    rows = [line.decode().split(" ||| ") for line in lines_of(capfdbinary)[:-1]]
    assert [row[0] for row in rows] == ["0"] * 3 + ["1"] * 3
    for number in ("0", "1"):
        scores = [float(row[3]) for row in rows if row[0] == number]
        assert scores == sorted(scores, reverse=True)


def test_translation_reads_no_further_than_its_window(run: Path) -> None:
    from itertools import count

    import torch

    from nmt_train.load_model import load_model
    from nmt_train.model.beam_search import SearchConfig
    from nmt_train.model.translator import Translator

    model, vocabulary, _ = load_model([run / "last"], torch.device("cpu"))
    read: list[int] = []

    def endless() -> Any:
        for number in count():
            read.append(number)
            yield "twelve"

    stream = Translator(model, vocabulary, SearchConfig(beam=1)).stream(endless(), window=10)
    for _ in range(25):
        next(stream)
    assert len(read) <= 31


def test_translations_of_a_window_are_written_before_the_next_line_is_read(
    run: Path, capfdbinary: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, written = [b"twelve\n", b"six\n"], []

    class Asking:
        """A program that waits for the translations of its two lines."""

        buffer = property(lambda self: self)

        def fileno(self) -> int:
            raise OSError

        def readline(self, size: int = -1) -> bytes:
            if lines:
                return lines.pop(0)
            written.append(capfdbinary.readouterr().out)
            return b""

    monkeypatch.setattr(sys, "stdin", Asking())
    assert call(translate, "--model", run, "--window", 2) == 0
    assert written[0].count(b"\n") == 2


def test_lines_are_translated_when_no_further_line_comes(run: Path) -> None:
    import torch

    from nmt_train.load_model import load_model
    from nmt_train.model.beam_search import SearchConfig
    from nmt_train.model.translator import Translator

    model, vocabulary, _ = load_model([run / "last"], torch.device("cpu"))
    answered = threading.Event()

    def asking() -> Any:
        yield from ("twelve", "six")
        assert answered.wait(60), "a window that is not full is not translated"
        yield "seven"
        raise UserError("the input ends here")

    stream = Translator(model, vocabulary, SearchConfig(beam=1)).stream(asking(), pause=0.01)
    assert all(next(stream) for _ in range(2))
    answered.set()
    assert next(stream)
    with pytest.raises(UserError, match="ends here"):
        next(stream)


def test_rows_are_printed_although_a_later_checkpoint_is_missing(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from nmt_train.report import table

    found = table.find_checkpoints(run)
    monkeypatch.setattr(table, "find_checkpoints", lambda path: [*found, run / "checkpoints" / "gone"])
    assert call(validate, run, "--metrics", "cross-entropy") == 2
    printed = capsys.readouterr()
    assert [path.name for path in found if f"{path} " in printed.out] == ["4", "8"]
    assert "gone" in printed.err


def test_a_folder_that_is_gone_in_the_middle_is_no_internal_error(capsys: pytest.CaptureFixture[str]) -> None:
    def command(arguments: Any) -> int:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "runs/mine/valid")

    assert cli.run(command, []) == 2
    assert "runs/mine/valid: No such file or directory; check the path" in capsys.readouterr().err


def test_options_of_a_figure_are_not_abbreviated(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(plot, "timeline", run, "--out", "a.png") == 2
    assert "--out" in capsys.readouterr().err


@pytest.mark.slow
def test_a_path_may_begin_with_the_home_folder(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(run.parent))
    assert call(plot, "convergence", f"~/{run.name}", "--output", tmp_path / "c.svg") == 0
    assert (tmp_path / "c.svg").exists()


def test_plots_of_a_real_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(plot, "convergence", run, "--output", tmp_path / "c.svg") == 0
    assert (
        call(plot, "convergence", run, "--metric", "bleu", "--clock", "training_seconds", "--output", tmp_path / "b.png") == 0
    )
    assert call(plot, "timeline", run, "--output", tmp_path / "t.png") == 0
    assert call(plot, "trace", run, "--chrome", "--output", tmp_path / "t.json") == 0
    names = {event["name"] for event in json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))["traceEvents"]}
    assert {"forward", "backward", "update"} <= names
    assert {path.name for path in tmp_path.iterdir()} == {"c.svg", "c.csv", "b.png", "b.csv", "t.png", "t.json"}
    assert capsys.readouterr().out.split() == [
        str(tmp_path / name) for name in ("c.svg", "c.csv", "b.png", "b.csv", "t.png", "t.json")
    ]


@pytest.mark.slow
def test_a_simulated_run_is_a_run_like_any_other(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = tmp_path / "there"
    common = ["--config", run.with_suffix(".yml"), "--run", there, "--cluster", CLUSTERS / "thesis-2x1.yml"]
    assert call(simulate, *common, "--mode", "sparse-overlap") == 0
    assert re.search(r"simulated \d+\.\d s of 2 ranks in \d+\.\d s", capsys.readouterr().err)
    assert call(validate, there / "last", "--metrics", "cross-entropy") == 0
    assert call(plot, "timeline", there, "--output", tmp_path / "t.png") == 0
    assert call(simulate, *common, "--mode", "vanilla", "--stop.after", "10u", "--force") == 0
    assert "continuing from" in capsys.readouterr().err


def test_timing_alone_prints_a_line_per_machine(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--config", run.with_suffix(".yml"), "--run", tmp_path / "there", "--mode", "overlap", "--timing-only", 12]
    assert call(simulate, *common, "--cluster", CLUSTERS / "thesis-2x2.yml") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["node", "ranks"], ["0", "2"], ["1", "2"], ["all", "4"]]
    assert call(simulate, *common, "--cluster", CLUSTERS / "thesis-2x2.yml", "--cluster.nodes", "3 x 1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["0", "1"], ["1", "1"], ["2", "1"], ["all", "3"]]
    timing = json.loads((tmp_path / "there" / "timing.json").read_text(encoding="utf-8"))
    assert f"{timing['words_per_second']:,.0f}" == lines[-1].split()[2]


@pytest.mark.slow
@pytest.mark.parametrize("what", [["--timing-only", 5], ["--stop.after", "2u"]], ids=str)
def test_nobody_takes_the_times_of_another_model_for_those_of_this_one(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: list[str | int]
) -> None:
    common = [
        "--config",
        run.with_suffix(".yml"),
        "--cluster",
        CLUSTERS / "gpu-4x1-1gbit.yml",
        "--cluster.nodes",
        "2 x 1",
        "--mode",
        "sync",
        *what,
    ]
    warning = r"warning: the times of the cluster file are those of a model with 60M parameters, and this one has 0\.\d+M"
    for folder, options, warned in (
        ("small", [], True),
        ("scaled", ["--cluster.scale.parameters", "50M"], False),
        ("unknown", ["--cluster.device.parameters", "null"], False),
    ):
        assert call(simulate, *common, "--run", tmp_path / folder, *options) == 0
        assert bool(re.search(warning, capsys.readouterr().err)) == warned


@pytest.mark.slow
def test_a_simulation_of_times_says_which_batch_it_assumes(
    run: Path, demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {key: value for key, value in small(demo, tmp_path / "run").items() if key in ("run", "corpus", "stop")}
    path = write(tmp_path, "open.yml", json.dumps(values).encode())
    common = ["--config", path, "--cluster", CLUSTERS / "thesis-2x1.yml", "--timing-only", 1]
    assert call(simulate, *common) == 0
    assert "decided: batch.tokens 2,048, as on a CPU" in capsys.readouterr().err
    assert call(simulate, *common, "--batch.tokens", 500) == 0
    assert "batch.tokens" not in capsys.readouterr().err


@pytest.mark.slow
def test_timing_needs_neither_the_configuration_nor_the_optimizer_of_the_run_in_its_folder(run: Path, tmp_path: Path) -> None:
    common = ["--config", run.with_suffix(".yml"), "--run", tmp_path / "there", "--cluster", CLUSTERS / "thesis-2x1.yml"]
    assert call(simulate, *common, "--mode", "downpour", "--stop.after", "3u") == 0
    assert call(simulate, *common, "--mode", "vanilla", "--batch.tokens", 400, "--timing-only", 5) == 0


def test_timing_leaves_no_spans_of_earlier_ranks(run: Path, tmp_path: Path) -> None:
    common = ["--config", run.with_suffix(".yml"), "--run", tmp_path / "there", "--timing-only", 5, "--trace", "true"]
    for nodes in ("3 x 1", "2 x 1"):
        assert (
            call(simulate, *common, "--mode", "sync", "--cluster", CLUSTERS / "thesis-2x1.yml", "--cluster.nodes", nodes) == 0
        )
    assert sorted(path.name for path in (tmp_path / "there" / "trace").iterdir()) == ["rank0.jsonl", "rank1.jsonl"]


def test_a_pipe_is_no_corpus(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    corpus = f"[{tmp_path / 'pipe'}, {tmp_path / 'pipe'}]"
    assert call(train, "--config", run.with_suffix(".yml"), "--run", tmp_path / "there", "--corpus.train", corpus) == 2
    assert "pipe: is a pipe, but a corpus is read several times; write it to a file first" in capsys.readouterr().err


@pytest.mark.slow
def test_timing_keeps_the_trace_of_a_training_run(run: Path, tmp_path: Path) -> None:
    common = ["--config", run.with_suffix(".yml"), "--run", tmp_path / "there", "--cluster", CLUSTERS / "thesis-2x1.yml"]
    common += ["--mode", "sync", "--stop.after", "2u"]
    assert call(simulate, *common, "--trace", "true") == 0
    assert call(simulate, *common, "--timing-only", 5) == 0
    assert (tmp_path / "there" / "trace" / "rank1.jsonl").exists()


def prepare(demo: Path, folder: Path, changes: dict[str, Any]) -> list[str]:
    values = small(demo, folder / "run")
    for name, value in changes.items():
        section, _, key = name.partition(".")
        if key:
            values.setdefault(section, {})[key] = value
        else:
            values[section] = value
    path = folder / "config.yml"
    path.write_text(json.dumps(values), encoding="utf-8")
    return ["--config", str(path)]


def write(folder: Path, name: str, data: bytes) -> str:
    (folder / name).write_bytes(data)
    return str(folder / name)


def text(demo: Path, name: str) -> bytes:
    return (demo / name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"corpus.train": ["@longer", "{demo}/train.de"]}, "has 601 lines and .* has 600"),
        ({"corpus.train": ["@latin1", "{demo}/train.de"]}, "latin1, line 600: not UTF-8"),
        ({"corpus.train": ["@empty", "@empty"]}, "corpus.train: the files are empty; give files that contain text"),
        ({"corpus.valid": ["@empty", "@empty"]}, "corpus.valid: the files are empty"),
        ({"corpus.valid": ["@blank", "{demo}/train.de"]}, "corpus.valid: the source side is empty; give files"),
        ({"corpus.train": ["@blank", "{demo}/train.de"]}, "corpus"),
        ({"corpus.max_length": 1}, "(no pair is left to train on .* 600|98.\\d% of the pairs would be left out .*) over-long"),
        ({"corpus.max_length": 12, "corpus.max_skipped": 0.01}, "would be left out .* corpus.max_skipped"),
        ({"corpus.vocabulary": {"size": 30_000}}, "30000 pieces are more than this corpus can fill; set it to"),
        ({"corpus.vocabulary": {"path": "@latin1"}}, "latin1: not a SentencePiece model"),
        ({"devices": "cuda"}, "asks for a GPU, but torch finds none"),
        ({"devices": [0]}, "asks for a GPU, but torch finds none"),
        ({"devices": "gpu"}, "devices: 'gpu' is unknown"),
        ({"mode": "hogwild"}, "mode: 'hogwild' is unknown; choose one of auto, single, vanilla, overlap, sparse"),
        ({"mode": "sparse_overlap"}, r"mode: 'sparse_overlap' is unknown; did you mean sparse-overlap\? There are auto,"),
        ({"mode": "overlap", "batch.accumulate": 2}, "batch.accumulate: mode overlap decides itself"),
        ({"mode": "sync", "replicas.codec": "top-k"}, "replicas.codec: top-k cannot be summed hop by hop"),
        ({"mode": "thesis-sparse", "optimizer.name": "muon"}, "optimizer.name: muon needs all elements of a matrix, but"),
        ({"mode": "sync", "server.bundle": 2}, "server.bundle: the settings of mode sync are in section replicas"),
        ({"mode": "pipe", "replicas.algorithm": "mpi"}, "replicas.algorithm: mpi sums dense, not half"),
        ({"mode": "low-bit", "replicas.algorithm": "butterfly"}, "butterfly is for the modes sync, powersgd"),
        ({"mode": "low-bit", "replicas.codec": "half"}, "replicas.codec: mode low-bit has encodings of its own"),
        ({"corpus.vocabulary": {"size": [50, 60]}, "model.tied": "all"}, "model.tied all would share one matrix"),
        ({"early-stopping": 10}, "unknown key early-stopping; did you mean stop.patience"),
        ({"mode": "low-bit", "low_bit.up": 4}, "low_bit.up: it should be 2, 3, 15 or 255, not 4"),
        ({"mode": "pipe", "batch.accumulate": 2}, "batch.accumulate: mode pipe decides itself"),
        ({"mode": "strom", "replicas.codec": "half"}, "replicas.codec: the settings of mode strom are in section peers"),
        ({"mode": "simuparallel", "stop.after": "40u"}, "stop.after: counts updates, but mode simuparallel makes only"),
        ({"mode": "backup", "devices": "cpu x 2", "server.backup": 2}, "with 2 workers and backup 2, rounds"),
        ({"mode": "backup", "server.up": "half"}, "server.backup: discards late pushes"),
        ({"mode": "vanilla", "server.backup": 2}, "server.backup: discards late pushes to rounds, but server.rule async"),
        ({"mode": "backup", "server.bundle": 3}, "server.bundle: a round of server.rule rounds ends when all workers"),
        ({"validation.command": "echo 1", "validation.every": None}, "validation.command needs validations, but"),
        ({"optimizer.cosine_until": "3e"}, "optimizer.cosine_until needs schedule cosine"),
        ({"optimizer.minimum": 5}, "optimizer.minimum is 5, above optimizer.learning_rate"),
        ({"batch.accumulate": 1000, "stop.after": "1e"}, "batch.accumulate: 1000 batches for an update are more than"),
        ({"recovery.every": "2e"}, "copies are made after a number of updates or a time: write 100u, 30s or 2m"),
        ({"mode": "backup", "server.one_channel_per_node": "true"}, "one_channel_per_node: lets one rank of a node"),
        ({"mode": "downpour", "server.per": "node"}, "server.per: node lets a node's devices exchange together"),
        ({"threshold.tau": 0}, "threshold.tau: it should be greater than 0"),
        ({"threshold.density": 0.9}, "threshold.density: it should be less than or equal to 0.5"),
        ({"devices": "cpu x 0"}, "devices: 'cpu x 0' is unknown"),
        ({"dropping.up": 1}, "dropping.up: it should be less than 1"),
        ({"batch.tokens": 50}, "batch.tokens: 50 cannot hold one sentence"),
        ({"corpus.train": ["@blank", "@blank"]}, "corpus.train: the files are empty; give files that contain text"),
        ({"corpus.valid": ["/dev/zero", "/dev/zero"]}, "/dev/zero, line 1: longer than 10,000,000 bytes"),
        ({"corpus.valid": ["@huge", "@huge"]}, "corpus.valid, line 1: longer than 4,000 pieces"),
        ({"run": "@latin1"}, "latin1: Not a directory; check the path, or choose another folder"),
        ({"corpus.vocabulary": {"size": 120, "type": "bpe", "sampling": 0.1}}, "sampling needs type unigram"),
    ],
)  # fmt: skip
def test_every_mistake_before_training_is_one_sentence_with_status_2(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], sentence: str
) -> None:
    made = {
        "longer": text(demo, "train.en") + b"one more\n",
        "latin1": text(demo, "train.en").rsplit(b"\n", 2)[0] + b"\nsch\xf6n\n",
        "empty": b"",
        "blank": b"\n" * 600,
        "huge": b"six " * 5000 + b"\n",
    }

    def fill(value: Any) -> Any:
        if isinstance(value, list):
            return [fill(item) for item in value]
        if isinstance(value, dict):
            return {key: fill(item) for key, item in value.items()}
        if isinstance(value, str) and value.startswith("@"):
            return write(tmp_path, value[1:], made[value[1:]])
        return value.format(demo=demo) if isinstance(value, str) else value

    arguments = prepare(demo, tmp_path, {key: fill(value) for key, value in changes.items()})
    assert cli.run(train.command, arguments) == 2
    output = capsys.readouterr().err
    complaint = output.splitlines()[-1]
    assert complaint.startswith("error: ")
    assert re.search(sentence, complaint), complaint
    assert "Traceback" not in output


@pytest.mark.slow
def test_overwriting_forgets_nothing_until_the_new_configuration_is_found_good(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy, symlinks=True)
    before = {path.name for path in copy.rglob("*")} - {".lock"}
    arguments = ["--config", str(run.with_suffix(".yml")), "--run", str(copy), "--overwrite"]
    for mistake in (["--corpus.train", "[nope, nope]"], ["--mode", "abc"], ["--corpus.max_length", "1"]):
        assert cli.run(train.command, [*arguments, *mistake]) == 2
        assert {path.name for path in copy.rglob("*")} - {".lock"} == before
    assert cli.run(train.command, [*arguments, "--stop.after", "1u"]) == 0
    assert [path.name for path in (copy / "checkpoints").iterdir()] == ["1"]


def test_a_job_that_slurm_has_queued_again_continues_what_it_was_told_to_overwrite(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy, symlinks=True)
    arguments = ["--config", str(run.with_suffix(".yml")), "--run", str(copy), "--overwrite"]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert cli.run(train.command, arguments) == 0
    assert "at update 8" in capsys.readouterr().err


def test_control_characters_over_long_and_empty_lines_are_survived_and_counted(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    english, german = (text(demo, f"train.{language}").split(b"\n")[:200] for language in ("en", "de"))
    english[:6] = [b"a\x00b", "x\u2028y\x85z".encode(), b"\xef\xbb\xbfone", b"two\r", b"", b"word " * 500]
    files = [write(tmp_path, "t.en", b"\n".join(english)), write(tmp_path, "t.de", b"\r\n".join(german))]
    arguments = prepare(demo, tmp_path, {"corpus.train": files, "stop": {"after": "1u"}})
    assert cli.run(train.command, arguments) == 0
    assert "left out: 1 with an empty side, 1 over-long, of 200 pairs" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "arguments", "sentence"),
    [
        (translate, ["--model", "absent"], "absent: does not exist, or is a broken link; give a run folder"),
        (translate, ["--model", "{tmp}"], "holds no checkpoint"),
        (translate, [], "command line: the following arguments are required: --model"),
        (translate, ["--model", "{run}", "--beam", "0"], "argument --beam"),
        (translate, ["--model", "{run}", "--beam", "abc"], "argument --beam: 'abc' is not a whole number"),
        (translate, ["--model", "{run}", "--normalization", "abc"], "argument --normalization: 'abc' is not a number"),
        (translate, ["--model", "{run}", "--bean", "3"], "'--bean' belongs to no option; did you mean --beam?"),
        (translate, ["--model", "{run}", "{run}.yml"], "one of its checkpoints; nmt-translate reads text from standard input"),
        (validate, ["{run}", "--beam", "1001"], "1001 is not between 1 and 1000"),
        (validate, ["{run}", "--batch-tokens", "9" * 400], "is not between 1 and 1000000000"),
        (translate, ["--model", "{run}", "--n-best", "9"], "--n-best 9 needs a --beam of at least as many"),
        (translate, ["--model", "{run}", "--devices", "cuda"], "finds none"),
        (translate, ["--model", "{run}", "--devices", "cpu x 3"], "--devices cpu x 3: names 3 devices, but one is used"),
        (validate, ["{run}", "--test", "absent"], "absent: No such file"),
        (validate, ["{run}", "--metrics", "meteor"], "argument --metrics: invalid choice"),
        (plot, ["convergence", "{tmp}"], "give a run folder"),
        (plot, ["convergence", "{run}", "--output", "{tmp}/x.doc"], "unknown extension"),
        (plot, ["trace", "{run}", "--chrome", "--output", "{tmp}"], "Is a directory; name a file that can be written"),
        (plot, ["timeline", "{run}", "--start", "1e9"], "choose a second inside it"),
        (plot, ["timeline", "{run}", "--seconds", "nan"], "nan is not a finite number"),
        (translate, ["--model", "{run}", "--average", "9"], "has 2 checkpoints, not the 9 that --average asks for"),
        (translate, ["--model", "{run}", "--threads", "-1"], "-1 is not between 0 and 1024"),
        (validate, ["{run}", "--normalization", "-1"], "-1 is not between 0 and 10"),
        (train, ["--model", "tiny"], "model is a section; give its keys, as in model.preset"),
        (validate, ["{run}", "--test", "a", "b", "--test", "c", "d"], "command line: --test is given twice; give it once"),
        (translate, ["--model", "{run}", "--beam=2", "--beam", "3"], "command line: --beam is given twice; give it once"),
        (train, ["--config", "{run}.yml", "--mode", "sync", "--mode=pipe"], "command line: --mode is given twice"),
        (simulate, ["--cluster.nodes", "2", "--cluster.nodes", "3"], "command line: --cluster.nodes is given twice"),
        (plot, ["timeline", "{run}", "--start", "1", "--start", "2"], "command line: --start is given twice; give it once"),
        (plot, ["draw"], "invalid choice: 'draw'"),
        (train, ["--corpus.max_length", "3", "stray"], "'stray' belongs to no option"),
        (train, ["stray"], "'stray' belongs to no option"),
        (simulate, ["--config", "{run}.yml"], "or your own) or --measure"),
        (simulate, ["--config", "{run}.yml", "--hosts", "x", "--cluster", "y"], "--hosts belongs to --measure"),
        (simulate, ["--config", "{run}.yml", "--cluster", "x", "--steps", "3"], "--steps belongs to --measure"),
        (
            simulate,
            ["--config", "{run}.yml", "--cluster", "x", "--timing-only", "3", "--shuffle-seed", "3"],
            "--shuffle-seed belongs to simulated training; remove it",
        ),
        (simulate, ["--config", "{run}.yml", "--measure", "--compare"], "--compare belongs to --cluster"),
        (simulate, ["--config", "{run}.yml", "--measure", "--cluster.loss", "0.1"], "--cluster.loss belongs to --cluster"),
        (simulate, ["--config", "{run}.yml", "--measure", "--overwrite"], "--overwrite belongs to simulated training"),
        (translate, ["--model", "{run}", "--window", "99999999999999999999"], "is not between 1 and 1000000000"),
        (plot, ["convergence", "{run}", "--metric", "signatures"], "metric signatures: unknown; choose one of cross-entropy"),
        (
            simulate,
            ["--config", "{run}.yml", "--cluster", "x", "--compare", "--timing-only", "3"],
            "give only one of --timing-only and --compare",
        ),
        (simulate, ["--config", "{run}.yml", "--cluster", "{tmp}/none.yml"], "none.yml: No such file"),
        (simulate, ["--config", "{run}.yml", "--cluster.nodse", "2"], "unknown key cluster.nodse; did you mean cluster.nodes?"),
        (simulate, ["--config", "{run}.yml", "--cluster", "{two}", "--mode", "single"], "single is for 1 machine, but"),
        (simulate, ["--config", "{run}.yml", "--cluster", "{two}", "--timing-only", "0"], "argument --timing-only"),
        (train, ["--config", "absent.yml"], "absent.yml: No such file"),
        (train, ["--config"], "expected one argument"),
        (train, ["--trace"], "is missing"),
        (train, ["--config", "{run}.yml", "--run", "~nobody-has-this-name/x"], "there is no such user"),
        (simulate, ["--config", "{run}.yml", "--cluster", "{two}", "--shuffle-seed", "-1"], "--shuffle-seed"),
        (train, ["--config", "{run}.yml", "--stop.after", f"{9:0<400}u"], "and finite"),
        (train, ["--config", "{run}.yml", "--stop.after", "-5e"], "command line: stop.after: '-5e' is not a duration"),
        (train, ["--config", "{run}.yml", "--batch.tokens", "1.5"], "it should be a whole number, or auto, not '1.5'"),
        (train, ["--config", "{run}.yml", "--compile", "perhaps"], "compile: it should be true or false, not 'perhaps'"),
        (train, ["--config", "{run}.yml", "--corpus.train", "{run}.yml"], "line 1: no tab; give two files, or one .tsv file"),
        (simulate, ["--config", "{run}.yml", "--cluster", "{two}", "--cluster.nodes", "x"], "command line: cluster.nodes: "),
        (simulate, ["--config", "{run}.yml", "--cluster", "{profile}"], "is the profile of a device; give a cluster file"),
    ],
)  # fmt: skip
def test_every_wrong_call_is_one_sentence_with_status_2(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: Any, arguments: list[str], sentence: str
) -> None:
    assert (
        cli.run(
            command.command,
            [
                argument.format(run=run, tmp=tmp_path, two=CLUSTERS / "thesis-2x1.yml", profile=CLUSTERS / "k40.yml")
                for argument in arguments
            ],
        )
        == 2
    )
    errors = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"error: .*{re.escape(sentence)}.*", errors[-1]), errors
    assert len(errors) == 1


def test_bad_text_on_standard_input_is_named_by_line(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call(translate, "--model", run, stdin=b"one\n\xff\n", monkeypatch=monkeypatch) == 2
    assert "standard input, line 2: not UTF-8" in capsys.readouterr().err


@pytest.mark.slow
def test_a_vocabulary_of_another_model_is_refused(
    run: Path, demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy, symlinks=True)
    other = tmp_path / "other"
    values = small(demo, other) | {"stop": {"after": "1u"}}
    values["corpus"]["vocabulary"] = {"size": 121}
    config_file = tmp_path / "other.yml"
    config_file.write_text(json.dumps(values), encoding="utf-8")
    assert cli.run(train.command, ["--config", str(config_file)]) == 0
    shutil.copy(other / "vocabulary.model", copy / "vocabulary.model")
    same = config.load([str(run.with_suffix(".yml"))], {})
    arguments = ["--config", str(run.with_suffix(".yml")), "--run", str(copy), "--stop.after", "9u"]
    assert str(same.run) == str(run)
    assert cli.run(train.command, arguments) == 2
    assert "was trained with another vocabulary" in capsys.readouterr().err


def test_our_own_mistakes_have_status_1_and_debug_shows_the_stack(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(arguments: Any) -> int:
        raise ZeroDivisionError("oops")

    assert cli.run(broken, []) == 1
    assert capsys.readouterr().err == "internal error: ZeroDivisionError: oops; please report it with the output of --debug\n"
    assert cli.run(broken, ["--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def raising(error: Exception) -> Any:
    def command(arguments: Any) -> int:
        raise error

    return command


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried ..."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried to allocate"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=str,
)
def test_too_little_memory_is_the_users_to_mend(capsys: pytest.CaptureFixture[str], error: Exception) -> None:
    assert cli.run(raising(error), []) == 2
    assert (
        capsys.readouterr().err
        == "error: out of memory; make batches (batch.tokens, --batch-tokens), the beam or the model smaller\n"
    )


def test_memory_that_torch_cannot_have_is_too_little_memory(capsys: pytest.CaptureFixture[str]) -> None:
    def greedy(arguments: Any) -> int:
        return len(torch.empty(1 << 55, dtype=torch.uint8))

    assert cli.run(greedy, []) == 2
    assert "error: out of memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: uncorrectable ECC error encountered",
        "CUDA error: unspecified launch failure",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        "CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`",
    ],
)
def test_a_fault_of_a_device_may_be_mended_by_a_new_start(capsys: pytest.CaptureFixture[str], message: str) -> None:
    assert cli.run(raising(RuntimeError(f"{message}\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1")), []) == TRY_AGAIN
    said = capsys.readouterr().err
    assert re.fullmatch(rf"error: host \S+: the device failed: {re.escape(message)}; start the same command again: .*\n", said)


@pytest.mark.parametrize("message", ["shared memory of another size", "pin_memory needs a tensor"])
def test_an_error_that_only_speaks_of_memory_is_our_own_mistake(capsys: pytest.CaptureFixture[str], message: str) -> None:
    assert cli.run(raising(RuntimeError(message)), []) == 1
    assert f"internal error: RuntimeError: {message}" in capsys.readouterr().err


@pytest.mark.slow
def test_output_that_cannot_be_written_is_one_sentence(run: Path) -> None:
    code = "from nmt_train.cli.validate import main; main()"
    with open("/dev/full", "w") as full:
        result = subprocess.run([sys.executable, "-c", code, str(run)], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (result.returncode, result.stderr.splitlines()[-1:]) == (
        2, ["error: output: No space left on device; free some space on its disk"],
    )  # fmt: skip


def test_the_users_file_is_not_replaced_by_the_configuration_of_the_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = run.with_suffix(".yml").read_text(encoding="utf-8")
    (tmp_path / "config.yml").write_text(text, encoding="utf-8")
    assert cli.run(train.command, ["--config", str(tmp_path / "config.yml"), "--run", str(tmp_path)]) == 2
    assert "the run would write its own config.yml over it; move it, or" in capsys.readouterr().err
    assert (tmp_path / "config.yml").read_text(encoding="utf-8") == text


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error(run: Path) -> None:
    code = "from nmt_train.cli.translate import main; main()"
    command = f"yes twelve | head -5000 | {sys.executable} -c '{code}' --model {run} --beam 1 --window 5 | head -1"
    result = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, timeout=120)
    assert result.stderr == ""
    assert len(result.stdout.splitlines()) == 1
    assert result.returncode == 141


@pytest.mark.parametrize(
    ("given", "value"),
    [
        (["--corpus.valid", "a b.en", "c, d: [e"], ["a b.en", "c, d: [e"]),
        (["--corpus.valid", "[a.en, b.de]"], ["a.en", "b.de"]),
        (["--corpus.valid", "pairs.tsv"], "pairs.tsv"),
        (["--corpus.valid", "{files: [a, b], name: x}"], None),
    ],
)
def test_the_words_after_an_option_are_a_list(capsys: pytest.CaptureFixture[str], given: list[str], value: Any) -> None:
    common = ["--corpus.train", "a", "b", "--stop.after", "2e", "3h", "--print-config"]
    status = cli.run(train.command, [*common, *given])
    if value is None:
        assert status == 2
    else:
        found = yaml.safe_load(capsys.readouterr().out)
        assert (found["corpus"]["train"], found["corpus"]["valid"]) == (["a", "b"], value)
        assert found["stop"]["after"] == ["2e", "3h"]


@pytest.mark.slow
@pytest.mark.parametrize(("locale", "said"), [({"PYTHONUTF8": "1"}, ""), ({"PYTHONUTF8": "0"}, ", or set PYTHONUTF8=1")])
def test_a_path_in_another_encoding_is_refused_with_a_true_reason(locale: dict[str, str], said: str) -> None:
    environment = os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"} | locale
    command = [sys.executable, "-m", "nmt_train.cli.train", "--run", b"run-\xff", "--print-config"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    encoding = "ascii" if said else "utf-8"
    assert done.returncode == 2
    assert f"run: its bytes are not {encoding}, the encoding of this locale; write it in this encoding{said}" in done.stderr
