"""The demo corpus, the corpus fetcher, the frame of check_gpu, the table of experiment_modes, and numbers in several pages."""

from __future__ import annotations

import gzip
import math
import random
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from nmt_train.codec import CODECS
from nmt_train.modes.table import MODES

CHECK_GPU = runpy.run_path(str(ROOT / "scripts" / "check_gpu"))
EXPERIMENT = runpy.run_path(str(ROOT / "scripts" / "experiment_modes"))
RESULTS = runpy.run_path(str(ROOT / "scripts" / "results"))
GRAMMAR = runpy.run_path(str(ROOT / "scripts" / "make_demo_corpus"))


@pytest.mark.parametrize(
    ("number", "english", "german"),
    [
        (0, "zero", "null"), (1, "one", "eins"), (16, "sixteen", "sechzehn"), (21, "twenty-one", "einundzwanzig"),
        (70, "seventy", "siebzig"), (101, "one hundred and one", "einhunderteins"),
        (1021, "one thousand and twenty-one", "eintausendeinundzwanzig"),
        (101_300, "one hundred and one thousand three hundred", "einhunderteintausenddreihundert"),
        (999_999, "nine hundred and ninety-nine thousand nine hundred and ninety-nine",
         "neunhundertneunundneunzigtausendneunhundertneunundneunzig"),
    ],
)  # fmt: skip
def test_numbers_in_words(number: int, english: str, german: str) -> None:
    assert GRAMMAR["english"](number) == english
    assert GRAMMAR["german"](number) == german


def test_ordinals_in_words() -> None:
    assert [GRAMMAR["ordinal_english"](n) for n in (1, 2, 12, 20, 23, 30)] == [
        "first", "second", "twelfth", "twentieth", "twenty-third", "thirtieth",
    ]  # fmt: skip
    assert [GRAMMAR["ordinal_german"](n) for n in (1, 3, 7, 19, 20, 31)] == [
        "erste", "dritte", "siebte", "neunzehnte", "zwanzigste", "einunddreißigste",
    ]  # fmt: skip


def test_the_demo_corpus_is_repeatable_and_its_parts_share_no_sentence(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        GRAMMAR["make"](tmp_path / name, seed, pairs=2000, held_out=100)
    parts = {
        part: (tmp_path / "a" / f"{part}.en").read_text(encoding="utf-8").splitlines() for part in ("train", "valid", "test")
    }
    assert {part: len(lines) for part, lines in parts.items()} == {"train": 2000, "valid": 100, "test": 100}
    assert len({line for lines in parts.values() for line in lines}) == 2200
    same, other = ((tmp_path / name / "train.de").read_bytes() for name in ("b", "c"))
    assert (tmp_path / "a" / "train.de").read_bytes() == same != other


def test_get_data_refuses_what_is_not_the_corpus_it_knows(tmp_path: Path) -> None:
    def get(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, ROOT / "scripts" / "get_data", *arguments], capture_output=True, text=True)

    missing = get("multi30k", "--from", str(tmp_path))
    assert missing.returncode == 2
    assert "give their folder with --from" in missing.stderr
    homeless = get("tatoeba-en-de")
    assert homeless.returncode == 2
    assert "has no fixed public home" in homeless.stderr
    script = runpy.run_path(str(ROOT / "scripts" / "get_data"))
    (tmp_path / "from").mkdir()
    (tmp_path / "into").mkdir()
    name = "val.en.gz"
    (tmp_path / "from" / name).write_bytes(gzip.compress(b"something else\n"))
    with pytest.raises(script["Mistake"], match=r"val\.en\.gz: the text has SHA-256 .* not the corpus we know"):
        script["fetch"]("multi30k", name, tmp_path / "from", tmp_path / "into")
    packed = bytearray(gzip.compress(random.Random(1).randbytes(1000).hex().encode()))
    packed[100:200] = bytes(100)
    (tmp_path / "from" / name).write_bytes(packed)
    with pytest.raises(script["Mistake"], match=r"val\.en\.gz: .*; fetch the files another way"):
        script["fetch"]("multi30k", name, tmp_path / "from", tmp_path / "into")
    assert list((tmp_path / "into").iterdir()) == []


PARSERS = sorted(
    str(path.relative_to(ROOT))
    for path in (*(ROOT / "scripts").glob("*"), *(ROOT / "scripts" / "reproduce").glob("*"))
    if path.is_file() and not path.suffix and "parse_args()" in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("script", PARSERS)
def test_every_script_explains_its_options(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.setattr("prepare.go_inside", lambda: None)
    monkeypatch.setattr(sys, "argv", [Path(script).name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {Path(script).name}")


REPRODUCTION = runpy.run_path(str(ROOT / "scripts" / "reproduce" / "thesis"))


class Slept:
    """A job of the reproduction whose run is a process that only an end from outside ends."""

    def __init__(self, folder: Path, name: str, ends: bool = False) -> None:
        self.finished, self._ends = folder / name, ends
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        seconds = 0 if self._ends else 600
        self.processes.append(subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"]))
        return self.processes[-1]

    def end(self, process: subprocess.Popen[bytes], stopped: bool = False) -> None:
        process.wait()
        self.finished.touch()


@pytest.mark.slow
def test_the_reproduction_ends_runs_that_are_good_enough_and_does_not_repeat_them(tmp_path: Path) -> None:
    jobs = [Slept(tmp_path, "short", ends=True), Slept(tmp_path, "long")]
    for _ in range(2):
        REPRODUCTION["side_by_side"](jobs, 2, lambda job: job is jobs[1] and bool(job.processes))
    assert [len(job.processes) for job in jobs] == [1, 1]
    assert all(job.finished.exists() for job in jobs)


@pytest.mark.slow
def test_an_interrupted_reproduction_ends_its_runs_and_they_go_on_next_time(tmp_path: Path) -> None:
    jobs = [Slept(tmp_path, "one"), Slept(tmp_path, "other"), Slept(tmp_path, "third")]

    def interrupted(job: Slept) -> bool:
        if len(jobs[1].processes) == 1:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        REPRODUCTION["side_by_side"](jobs, 2, interrupted)
    assert [len(job.processes) for job in jobs] == [1, 1, 0]
    assert all(process.returncode is not None for job in jobs for process in job.processes)
    assert not any(job.finished.exists() for job in jobs)
    REPRODUCTION["side_by_side"](jobs, 2, lambda job: len(job.processes) > 1 or job is jobs[2])
    assert [len(job.processes) for job in jobs] == [2, 2, 0], "the third had all it needed already"
    assert all(job.finished.exists() for job in jobs)


def test_an_interrupted_reproduction_says_how_it_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    def ended() -> int:
        signal.raise_signal(signal.SIGTERM)
        return 0

    statuses = [REPRODUCTION["interruptible"](main) for main in (interrupted, ended)]
    assert statuses == [128 + signal.SIGINT, 128 + signal.SIGTERM]
    assert capsys.readouterr().err == 2 * "stopped; run the same command to continue\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_nothing_is_written(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = CHECK_GPU["DOCS"].read_text(encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["check_gpu"])
    assert CHECK_GPU["main"]() == 2
    assert capsys.readouterr().err.startswith("error: this machine offers no GPU to torch")
    assert CHECK_GPU["DOCS"].read_text(encoding="utf-8") == before


def test_what_was_found_on_a_gpu_is_written_into_its_place_as_often_as_one_likes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = tmp_path / "benchmarks.md"
    docs.write_text(f"before\n{CHECK_GPU['BEGIN']}\nnothing\n{CHECK_GPU['END']}\nafter\n", encoding="utf-8")
    monkeypatch.setitem(CHECK_GPU["write"].__globals__, "DOCS", docs)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "some GPU")
    written = []
    for _ in range(2):
        CHECK_GPU["write"](CHECK_GPU["table"]({"codecs": {"passed": False, "found": "a|b", "seconds": 3.4}}))
        written.append(docs.read_text(encoding="utf-8"))
    assert written[0] == written[1]
    assert written[0].startswith("before\n")
    assert written[0].endswith(f"| codecs | FAILED | 3 | a/b |\n{CHECK_GPU['END']}\nafter\n")
    assert "nothing" not in written[0]


@pytest.mark.slow
def test_the_training_loop_of_check_gpu_runs_also_without_a_gpu(tmp_path: Path) -> None:
    row = next(row for row in CHECK_GPU["ROWS"] if row.cpu and "base" in row.name)
    assert "words/s" in row.work("cpu", tmp_path)


@pytest.mark.slow
def test_a_row_of_check_gpu_that_hangs_is_ended_with_all_that_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = tmp_path / "stuck"
    stuck.write_text("import subprocess\nsubprocess.run(['sleep', '1000'])\n", encoding="utf-8")
    monkeypatch.setitem(CHECK_GPU["run"].__globals__, "__file__", str(stuck))
    row = CHECK_GPU["Row"]("tests", "hangs", 1.0, lambda device, folder: "")
    done = CHECK_GPU["run"](row, "cpu", tmp_path)
    assert (done["passed"], done["found"]) == (False, "not done in 1 s; status -9")


def test_the_time_to_a_cross_entropy_lies_on_the_line_between_two_validations() -> None:
    curve = [(30.0, 5.0), (60.0, 4.0), (90.0, 3.0)]
    assert [EXPERIMENT["seconds_to"](level, curve) for level in (5.5, 4.5, 3.25, 2.0)] == [30, 45, 82.5, math.inf]


def test_a_table_says_the_median_the_range_and_what_did_not_reach_a_level() -> None:
    said = EXPERIMENT["said"]
    assert said([1234.4], 0) == "1,234"
    assert said([3, 1, 2], 1) == "2.0 (1.0 to 3.0)"
    assert said([3, math.inf, 2], 0) == "3 (2 to 3; 1 did not reach it)"
    assert said([math.inf, math.inf, 2], 0) == "(2 to 2; 2 did not reach it)"
    assert said([math.inf], 0) == said([math.inf, math.inf], 0) == ""


def test_the_golden_results_have_every_mode_and_codec() -> None:
    golden = runpy.run_path(str(ROOT / "scripts" / "golden"))
    for name, registry in (("MODES", MODES), ("CODECS", CODECS)):
        assert set(golden[name]) == set(registry), name


def test_a_repeated_number_is_rounded_as_each_page_does_and_put_into_it() -> None:
    pages = {"a.md": "| `x` | **2.784 (2.7\n-2.9)** |", "b.md": "as fast:\n3.0 times", "c.md": "| x | 2.78 |"}
    repeated = {"b.md": "as fast: {} times", "c.md": "| {} |"}
    wrong = RESULTS["correct"](pages, [{"from": {"a.md": "| `x` | **{} ("}, "repeated": repeated}])
    assert pages["b.md"] == "as fast:\n2.8 times"
    assert pages["c.md"] == "| x | 2.78 |"
    assert len(wrong) == 1
    assert wrong[0].startswith("b.md: ")


@pytest.mark.parametrize("text", ["nothing", "1 and 2"])
def test_a_text_that_is_not_in_its_page_exactly_once_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"docs/results.yml: a.md has \d places like"):
        RESULTS["find"]({"a.md": text}, "a.md", "{}")
