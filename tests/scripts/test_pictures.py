"""The pictures of the documents: drawn from CSV files, small, and complete."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from matplotlib.colors import to_hex
from reproduce import comparison_pictures, other_pictures, thesis_pictures
from reproduce.comparison_pictures import curves, overview, which_mode
from reproduce.places import FAST, SLOW
from reproduce.runs import Setup
from reproduce.systems import ALONE
from reproduce.thesis import Results
from reproduce.trials import Trial, Trials

from nmt_train.modes.table import MODES
from nmt_train.report.figure import CONTEXT, look

DOCS = ROOT / "docs"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved."""
    found = list[Any]()
    for module in (comparison_pictures, other_pictures):
        monkeypatch.setattr(module, "save_figure", lambda figure, output: found.append(figure))
    return found


def falling(words: int, seconds: float, end: float, start: float = 5.0) -> list[dict[str, float]]:
    return [
        {"words": words * n // 5, "seconds": seconds * n / 5, "cross-entropy": start + (end - start) * n / 5}
        for n in range(1, 6)
    ]  # fmt: skip


def add(trials: Trials, system: str, place: str, seconds: float, end: float, seeds: Sequence[int] = (0,)) -> None:
    for seed in seeds:
        trials.found[Trial(system, place, 2000, seed, ())] = falling(2000, seconds, end)


@pytest.fixture
def trials(tmp_path: Path) -> Trials:
    its = Trials(tmp_path / "trials.csv")
    add(its, ALONE, FAST, 2000, 2.5)
    its.found[Trial(ALONE, FAST, 1000, 0, ())] = falling(1000, 1000, 3.0)
    add(its, "low-bit", FAST, 700, 2.5, seeds=(0, 1, 2))
    add(its, "strom", FAST, 900, 2.5)
    add(its, "strom", SLOW, 1000, 2.5)
    add(its, "vanilla", FAST, 90_000, 4.9)
    return its


def test_the_overview_marks_rivals_single_runs_and_what_was_not_run(trials: Trials, drawn: list[Any], tmp_path: Path) -> None:
    overview(trials, tmp_path / "overview.svg")
    panels = {axes.get_title(loc="left").splitlines()[0]: axes for axes in drawn[0].axes}
    assert "low-bit at 1 Gbit/s" in drawn[0].get_suptitle()
    rows = [label.get_text() for label in drawn[0].axes[0].get_yticklabels()]
    assert rows[:2] == ["low-bit", "strom"]
    bars = {rows[round(bar.get_y() + bar.get_height() / 2)]: bar for bar in panels[FAST].patches}
    assert {name: (bar.get_hatch(), bar.get_alpha()) for name, bar in bars.items()} == {
        "low-bit": ("", 1), "strom": ("///", 0.45), "vanilla": ("", 0.45),
    }  # fmt: skip
    assert to_hex(bars["low-bit"].get_facecolor()) == look("low-bit")["color"]
    assert to_hex(bars["strom"].get_facecolor()) == CONTEXT
    assert [text.get_text() for text in panels[SLOW].texts].count("not run") == 2, "low-bit and vanilla"


def test_a_curve_outside_the_picture_has_no_label(trials: Trials, drawn: list[Any], tmp_path: Path) -> None:
    curves(trials, FAST, tmp_path / "curves.svg")
    (axes,) = drawn[0].axes
    assert {text.get_text() for text in axes.texts} == {ALONE, "low-bit", "strom"}
    assert axes.get_xlim()[1] < 2000, "it ends soon after the quick systems"
    assert drawn[0].get_suptitle() == "1 Gbit/s: low-bit is 2.9 times as fast as one machine"


def test_the_picture_of_modes_has_simulated_and_measured_speedups(trials: Trials, drawn: list[Any], tmp_path: Path) -> None:
    rows = ["single,,1,999,1,1000,0", "sync,,4,999,1.25,2500,1", "sync,,4,999,1.25,9000,1", "sync,,4,999,1.25,1000,1"]
    header = "case,mode,settings,machines,predicted,needed,measured,recommended"
    cases = "".join(f'"4 hosts, 10mbit",{row}\n' for row in rows)
    (tmp_path / "adviser.csv").write_text(f'{header}\n{cases}"2 hosts, 10mbit",sync,,2,999,1,7,1\n', encoding="utf-8")
    which_mode(trials, tmp_path / "adviser.csv", tmp_path / "which.svg")
    points = {
        (line.get_fillstyle(), round(x, 2), round(y, 2)) for line in drawn[0].axes[0].lines
        for x, y in line.get_xydata() if line.get_marker() == "o"
    }  # fmt: skip
    steps = 3 * 2.3e6 / (10e6 / 8) / (2048 / 1000)
    assert points == {("full", 7.0, 2.86), ("none", round(steps, 2), 2.0)}


def test_the_advice_in_the_picture_is_that_of_the_readme() -> None:
    limits = [limit for limit, _ in comparison_pictures.ADVICE]
    table = re.findall(r"(?m)^\| ((?:below|up to|hundreds|\d).*?) \|", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert limits[:-1] == [max(float(its) for its in re.findall(r"[\d.]+", row.partition(";")[0])) for row in table[:-1]]


def test_predictions_are_compared_with_the_median_of_measurements(drawn: list[Any], tmp_path: Path) -> None:
    header = "case,mode,settings,machines,predicted,needed,measured,recommended"
    measured = {("10mbit", 2000): (1000, 2000, 9000), ("100mbit", 2200): (2000,), ("1000mbit", 3000): (2000,)}
    rows = [f'"2 hosts, {rate}",sync,,2,{its},1,{speed},0' for (rate, its), speeds in measured.items() for speed in speeds]
    (tmp_path / "adviser.csv").write_text("\n".join([header, *rows]), encoding="utf-8")
    other_pictures.predicted(tmp_path / "adviser.csv", tmp_path / "its.svg")
    assert drawn[0].get_suptitle() == "Predicted words/s are off by 10% in the median, by 50% at most"


def test_the_picture_of_a_kill_says_after_how_long_the_others_continue(drawn: list[Any], tmp_path: Path) -> None:
    rows = [(second, f"rank {rank}", 1000.0) for second in range(40) for rank in range(3) if rank < 2 or second < 20]
    rows += [(20.5, "rank 2 killed", ""), (23.0, "the others continue", "")]
    text = "".join(f"{second},{what},{speed}\n" for second, what, speed in rows)
    (tmp_path / "kill.csv").write_text(f"seconds,what,words/s\n{text}", encoding="utf-8")
    other_pictures.kill(tmp_path / "kill.csv", tmp_path / "kill.svg")
    assert drawn[0].get_suptitle() == "Rank 2 killed: the others continue after 2.5 s"
    top = drawn[0].axes[0].collections[-1].get_paths()[0].vertices[:, 1]
    assert math.isclose(top.max(), 3000)


def test_the_architecture_has_every_family_of_strategies() -> None:
    assert {name for name, *_ in other_pictures._FAMILIES} == {type(mode.family).__name__.lower() for mode in MODES.values()}


def test_a_timeline_of_the_thesis_is_drawn_from_the_file_when_the_run_is_gone(tmp_path: Path) -> None:
    run, pictures = tmp_path / "runs" / "timing" / Setup("single", "1x1").name, tmp_path / "thesis"
    (run / "trace").mkdir(parents=True)
    (run / "finished").touch()
    spans = [
        {"name": name, "thread": "MainThread", "rank": 0, "start": step + start, "end": step + end, "update": step}
        for step in range(30) for name, start, end in (("forward", 0.0, 0.3), ("backward", 0.3, 0.9))
    ]  # fmt: skip
    (run / "trace" / "rank0.jsonl").write_text("".join(json.dumps(span) + "\n" for span in spans), encoding="utf-8")
    found = Results(tmp_path / "found")
    assert list(thesis_pictures.draw(found, tmp_path / "runs", pictures)) == ["4.1"]
    first = (pictures / "figure-4.1.svg").read_bytes()
    (pictures / "figure-4.1.svg").unlink()
    assert list(thesis_pictures.draw(found, None, pictures)) == ["4.1"]
    assert (pictures / "figure-4.1.svg").read_bytes() == first
    assert b"computes 90%" in first


def test_the_documents_show_small_opaque_vector_graphics() -> None:
    pictures = [*DOCS.rglob("*.svg")]
    assert len(pictures) > 40
    assert [its.name for its in pictures if its.stat().st_size > 300_000] == []
    assert [its.name for its in pictures if "fill: #ffffff" not in its.read_text(encoding="utf-8")] == []


def test_every_picture_is_shown_by_a_document() -> None:
    shown = {
        (page.parent / link).resolve()
        for page in (ROOT / "README.md", *DOCS.rglob("*.md"))
        for link in re.findall(r"\]\(([^)\s]+\.(?:svg|png))\)", page.read_text(encoding="utf-8"))
    }  # fmt: skip
    assert {its.name for its in DOCS.rglob("*.svg")} - {its.name for its in shown} == set()


def test_settings_of_other_trials_do_not_change_a_color() -> None:
    assert comparison_pictures.style("sparse-local") == look("sparse-local")
    assert comparison_pictures.style("sparse-local 99.9%")["color"] == CONTEXT
