"""The thesis's claims are judged by what runs left behind."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from reproduce.claims import HOLDS, IN_PART, NOT
from reproduce.runs import Missing, NotReached, Setup
from reproduce.thesis import BOUND, Results
from reproduce.thesis_claims import CLAIMS

from nmt_train.common.errors import UserError

JUDGE = {claim.id: claim.judge for claim in CLAIMS}
_ONE = Setup("single", "1x1")


@pytest.fixture
def found(tmp_path: Path) -> Results:
    return Results(tmp_path, target=3.0)


def runs_at(found: Results, folder: Path, speeds: dict[str, float], mode: str) -> None:
    for cluster, speed in speeds.items():
        path = folder / "timing" / Setup(mode, cluster).name / "timing.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"words_per_second": speed, "seconds": 1.0, "ranks": []}))


def learns(folder: Path, setup: Setup, points: list[tuple[float, float]]) -> None:
    """Cross-entropy after these numbers of seconds, at 100 words/s."""
    path = folder / "training" / setup.name / "metrics.jsonl"
    path.parent.mkdir(parents=True)
    events = [{"event": "validation", "seconds": s, "words": 100 * s, "cross-entropy": value} for s, value in points]
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    path.with_name("finished").touch()


def reaches(folder: Path, setup: Setup, seconds: float) -> None:
    learns(folder, setup, [(seconds / 2, 4.0), (seconds, 3.0)])


def test_the_time_to_the_target_lies_on_a_line_between_two_validations(found: Results, tmp_path: Path) -> None:
    learns(tmp_path, _ONE, [(10, 5.0), (20, 3.5), (30, 2.5)])
    assert found.seconds("single", "1x1") == pytest.approx(25)


def test_what_never_reaches_the_target_takes_for_ever(found: Results, tmp_path: Path) -> None:
    learns(tmp_path, _ONE, [(10, 5.0), (20, 3.1)])
    assert math.isinf(found.seconds("single", "1x1"))
    reaches(tmp_path, Setup("overlap", "2x2"), 20)
    with pytest.raises(NotReached, match=r"single-1x1 does not reach 3\.000"):
        found.gain(_ONE, Setup("overlap", "2x2"))


@pytest.mark.parametrize(
    ("words", "points"),
    [(7000, [(80, 2.9), (90, 2.8), (100, 2.7)]), (5000, [(10, 5.0), (20, 4.0), (60, 2.9), (70, 2.8), (80, 2.7)])],
    ids=["none before it", "a gap before it"],
)  # fmt: skip
def test_nothing_is_made_up_where_validations_are_missing(
    found: Results, tmp_path: Path, words: float, points: list[tuple[float, float]]
) -> None:
    learns(tmp_path, _ONE, points)
    with pytest.raises(Missing, match="validations of single-1x1 before .* words are missing"):
        found.seconds("single", "1x1")
    with pytest.raises(Missing):
        found.after(_ONE, words)


def test_a_gap_elsewhere_does_no_harm(found: Results, tmp_path: Path) -> None:
    learns(tmp_path, _ONE, [(10, 6.0), (30, 5.0), (40, 3.5), (50, 2.5), (80, 2.0)])
    assert found.seconds("single", "1x1") == pytest.approx(45)


def test_a_run_that_still_goes_on_is_not_judged(found: Results, tmp_path: Path) -> None:
    reaches(tmp_path, _ONE, 100)
    (tmp_path / "training" / _ONE.name / "finished").unlink()
    with pytest.raises(UserError, match="single-1x1: is not finished"):
        found.seconds("single", "1x1")


def test_cross_entropy_at_equal_words_lies_on_a_line_too(found: Results, tmp_path: Path) -> None:
    learns(tmp_path, _ONE, [(10, 5.0), (20, 4.0)])
    assert found.after(_ONE, 1500) == pytest.approx(4.5)
    assert found.after(_ONE, 9999) == 4.0


@pytest.mark.parametrize(
    ("speeds", "judged"),
    [([1, 1.9, 3.2, 4.3], HOLDS), ([1, 1.9, 3.6, 6.8], IN_PART), ([1, 1.5, 3.5, 8], NOT)],
    ids=["ever less, 4.3 times", "ever less, but more", "ever more"],
)
def test_t1_devices_of_one_machine_add_ever_less(found: Results, tmp_path: Path, speeds: list[float], judged: str) -> None:
    runs_at(found, tmp_path, dict(zip(("1x1", "1x2", "1x4", "1x8"), speeds, strict=True)), "single")
    assert JUDGE["T1"](found)[1] == judged


@pytest.mark.parametrize(("with_bound", "judged"), [((98, 70), HOLDS), ((98, 88), IN_PART), ((98, 100), NOT)])
def test_t9_a_bound_helps_dual_machines(found: Results, tmp_path: Path, with_bound: tuple[float, float], judged: str) -> None:
    for cluster, seconds in zip(("2x1", "2x2"), with_bound, strict=True):
        reaches(tmp_path, Setup("overlap", cluster), 100)
        reaches(tmp_path, Setup("overlap", cluster, BOUND), seconds)
    assert JUDGE["T9"](found)[1] == judged


@pytest.mark.parametrize(
    ("seconds", "judged"), [((45, 25, 20), HOLDS), ((60, 40, 30), IN_PART), ((90, 40, 20), NOT)], ids=[HOLDS, IN_PART, NOT]
)
def test_t16_more_machines_reach_it_sooner(
    found: Results, tmp_path: Path, seconds: tuple[float, float, float], judged: str
) -> None:
    reaches(tmp_path, _ONE, 100)
    for cluster, time in zip(("3x1", "4x2", "7x1"), seconds, strict=True):
        reaches(tmp_path, Setup("sparse-overlap", cluster), time)
    text, verdict = JUDGE["T16"](found)
    assert verdict == judged
    assert f"7x1 {100 / seconds[2]:.2f}x" in text
