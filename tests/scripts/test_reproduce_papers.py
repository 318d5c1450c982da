"""The claims of the other papers, and the league of all modes, are judged by what runs left behind."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from reproduce import league, papers
from reproduce.claims import HOLDS, IN_PART, NOT
from reproduce.papers import BATCHES, BUNDLES, CODECS, SPEEDS, TAUS, WIDTHS, WORKERS
from reproduce.papers_claims import CLAIMS
from reproduce.papers_page import PICTURES, write
from reproduce.runs import Runs, Setup

from nmt_train import config as configuration
from nmt_train.modes import build as modes
from nmt_train.simulation import cluster

TIMED = [*papers.TIMED, *league.TIMED]
TRAINED = [*papers.TRAINED, *(setup for seed in league.SEEDS for setup in league.setups(seed))]
ALL = [*TIMED, *TRAINED]
JUDGE = {claim.id: claim.judge for claim in CLAIMS}


def timed(folder: Path, setup: Setup, speed: float, workers: int = 4, sent: float = 0.0) -> None:
    """A timing with this speed of each worker [words/s] and this traffic [bytes/word]."""
    path = folder / "timing" / setup.name / "timing.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    rank = {"sent": sent * 10 * speed, "words_per_second": speed, "seconds": 10}
    path.write_text(json.dumps({"words_per_second": speed * workers, "elements": 1000, "ranks": [rank] * workers}))


def learnt(folder: Path, setup: Setup, end: float, **more: Any) -> None:
    """Cross-entropy that falls linearly from 6 to `end` over the words, at this speed [words/s]."""
    speed, messages, size = more.get("speed", 1000.0), more.get("messages", 100), more.get("size", 50)
    path = folder / "training" / setup.name / "metrics.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    words = [papers.WORDS * tenth / 10 for tenth in range(1, 11)]
    events: list[dict[str, Any]] = [
        {"event": "validation", "words": its, "seconds": its / speed, "cross-entropy": 6 + (end - 6) * its / papers.WORDS}
        for its in words
    ]
    rank = {"sent": {"peer": [messages, messages * size], "report": [9, 9]}, "staleness": {str(more.get("stale", 0)): 10}}
    events.append({"event": "ranks", "words": papers.WORDS, "ranks": [rank, rank]})
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    path.with_name("finished").touch()


@pytest.mark.parametrize(("gain", "judged"), [(2.5, HOLDS), (1.4, IN_PART), (0.9, NOT)])
def test_p1_pipe_is_faster_where_computing_and_exchanging_take_alike(tmp_path: Path, gain: float, judged: str) -> None:
    for seconds in BATCHES:
        timed(tmp_path, papers.pipe(seconds, "half"), 60)
        timed(tmp_path, papers.pipe(seconds, "int8"), 100 * gain)
        timed(tmp_path, papers.all_reduce(seconds), 100)
        timed(tmp_path, papers.by_server(seconds), 55)
    assert JUDGE["P1"](Runs(tmp_path))[1] == judged


@pytest.mark.parametrize(("slower", "judged"), [(1.0, HOLDS), (1.15, IN_PART), (1.5, NOT)])
def test_p2_a_step_takes_the_longer_of_computing_and_exchanging(tmp_path: Path, slower: float, judged: str) -> None:
    for seconds in BATCHES:
        timed(tmp_path, papers.alone(seconds), 1 / seconds)
        for codec in CODECS:
            timed(tmp_path, papers.pipe(seconds, codec), 1 / max(slower * seconds, 0.1))
    assert JUDGE["P2"](Runs(tmp_path))[1] == judged


@pytest.mark.parametrize(
    ("ends", "judged"), [((3.0, 3.1, 3.3, 3.9), HOLDS), ((3.0, 2.9, 3.3, 3.9), IN_PART), ((3.3, 3.2, 3.1, 3.0), NOT)]
)
def test_p3_wider_pipelines_harm(tmp_path: Path, ends: tuple[float, ...], judged: str) -> None:
    for width, end in zip(WIDTHS, ends, strict=True):
        learnt(tmp_path, papers.of_width(width), end)
    for width in WIDTHS[:2]:
        timed(tmp_path, papers.timed_width(width), 100)
    assert JUDGE["P3"](Runs(tmp_path))[1] == judged


@pytest.mark.parametrize(("eighth", "end", "judged"), [(1.0, 3.0, HOLDS), (1.0, 3.5, IN_PART), (3.0, 3.0, NOT)])
def test_p4_bytes_fall_and_quality_stays(tmp_path: Path, eighth: float, end: float, judged: str) -> None:
    timed(tmp_path, papers.all_reduce(BATCHES[2]), 100, sent=4.0)
    timed(tmp_path, papers.pipe(BATCHES[2], "half"), 100, sent=2.0)
    timed(tmp_path, papers.pipe(BATCHES[2], "int8"), 100, sent=eighth)
    learnt(tmp_path, papers.SYNC, 3.0)
    for setup in papers.WARMED.values():
        learnt(tmp_path, setup, end)
    assert JUDGE["P4"](Runs(tmp_path))[1] == judged


@pytest.mark.parametrize(("share", "judged"), [(0.8, HOLDS), (0.65, IN_PART), (0.3, NOT)])
def test_s1_speed_grows_with_the_nodes(tmp_path: Path, share: float, judged: str) -> None:
    for nodes in SPEEDS:
        timed(tmp_path, papers.strom_nodes(nodes), 100 * (share if nodes > 1 else 1), workers=nodes)
    for setup in (papers.STROM_ALONE, *papers.STROMS):
        learnt(tmp_path, setup, 3.0)
    assert JUDGE["S1"](Runs(tmp_path))[1] == judged


@pytest.mark.parametrize(
    ("sizes", "ends", "judged"),
    [
        ((400, 100, 40, 10, 2), (3.0, 3.0, 3.0, 3.1, 4.0), HOLDS),
        ((400, 300, 40, 10, 8), (3.0, 3.0, 4.0, 4.1, 4.2), IN_PART),
        ((400, 100, 40, 10, 2), (3.0, 3.0, 3.0, 3.0, 3.0), NOT),
    ],
)
def test_s2_quality_holds_over_a_range_of_thresholds(
    tmp_path: Path, sizes: tuple[int, ...], ends: tuple[float, ...], judged: str
) -> None:
    timed(tmp_path, papers.STROM_ALONE, 100, workers=1)
    for tau, size, end in zip(TAUS, sizes, ends, strict=True):
        learnt(tmp_path, papers.strom_tau(tau), end, size=size)
    learnt(tmp_path, papers.strom_coding("words"), 3.0, size=20)
    text, found = JUDGE["S2"](Runs(tmp_path))
    assert found == judged
    assert f"tau {TAUS[1]:g}: {4000 / sizes[1]:,.0f} times" in text
    assert "tau adapted to 1/846 of the elements: 200 times, 3.000" in text


@pytest.mark.parametrize(("size", "judged"), [(33, HOLDS), (44, IN_PART), (60, NOT)])
def test_s3_bits_are_those_of_a_message_by_its_words(tmp_path: Path, size: int, judged: str) -> None:
    learnt(tmp_path, papers.strom_coding("words"), 3.0, size=100)
    learnt(tmp_path, papers.strom_coding("golomb-rice"), 3.0, size=size)
    assert JUDGE["S3"](Runs(tmp_path)) == (f"{32 * size / 100:.1f} bits, including the sign", judged)


@pytest.mark.parametrize(
    ("speeds", "judged"),
    [((10, 20, 40, 65, 50), HOLDS), ((10, 20, 30, 35, 30), IN_PART), ((10, 20, 40, 65, 90), NOT)],
)
def test_f1_eight_workers_are_best(tmp_path: Path, speeds: tuple[float, ...], judged: str) -> None:
    for workers, speed in zip(WORKERS, speeds, strict=True):
        learnt(tmp_path, papers.downpour(workers), 3.0, speed=speed)
    assert JUDGE["F1"](Runs(tmp_path))[1] == judged


def test_f2_compares_at_equal_times_and_at_equal_words(tmp_path: Path) -> None:
    for workers, speed in zip(WORKERS, (30, 40, 50, 60, 70), strict=True):
        learnt(tmp_path, papers.downpour(workers), 3.0 + workers / 100, speed=speed)
    learnt(tmp_path, papers.downpour(2, "sgd"), 4.0)
    learnt(tmp_path, papers.downpour(8, "sgd"), 5.0)
    text, judged = JUDGE["F2"](Runs(tmp_path))
    assert "after equal words, 8 workers differ from 2 by +0.06 (AdaGrad), +1.00 (SGD)" in text
    assert judged == IN_PART  # more workers end better, but do not begin worse


@pytest.mark.parametrize(("aware", "judged"), [(3.05, HOLDS), (3.4, IN_PART), (3.6, NOT)])
def test_a1_staleness_aware_steps_are_nearly_as_good_as_synchronous_ones(tmp_path: Path, aware: float, judged: str) -> None:
    for setup, end in ((papers.TOGETHER, 3.0), (papers.ASYNC, 3.5), (papers.AWARE, aware)):
        learnt(tmp_path, setup, end)
    assert JUDGE["A1"](Runs(tmp_path))[1] == judged


@pytest.mark.parametrize(
    ("last", "stale", "judged"), [(3.05, (7, 3, 1, 0), HOLDS), (3.4, (7, 3, 1, 0), IN_PART), (3.0, (0, 1, 3, 7), NOT)]
)
def test_a2_larger_bundles_come_near_to_sync(tmp_path: Path, last: float, stale: tuple[int, ...], judged: str) -> None:
    learnt(tmp_path, papers.TOGETHER, 3.0)
    for setup, old in zip((papers.ASYNC, *map(papers.softsync, BUNDLES)), stale, strict=True):
        learnt(tmp_path, setup, last, stale=old)
    assert JUDGE["A2"](Runs(tmp_path))[1] == judged


def everything(folder: Path) -> None:
    for setup in papers.TIMED:
        timed(folder, setup, 100, sent=4.0)
    for setup in papers.TRAINED:
        learnt(folder, setup, 3.0)
    for rate, speed in league.RATES.items():
        for row in league.IN_STEP:
            timed(folder, league.setup(row, rate, 1), 100 * speed)
    for seed in league.SEEDS:
        for setup in league.setups(seed):
            its = 200.0 if setup.mode == "single" else 400.0 + 100 * seed
            learnt(folder, setup, 3.0 if setup.mode != "downpour" else 4.0, speed=its, size=50 if setup.mode != "sparse" else 1)
            (folder / "training" / setup.name / league.TEST).write_text('{"bleu": 12.34}\n')


def test_the_page_has_every_claim_every_picture_and_every_mode(tmp_path: Path) -> None:
    everything(tmp_path / "runs")
    write(tmp_path / "runs", tmp_path / "systems.md", "scripts/reproduce/papers")
    text = (tmp_path / "systems.md").read_text(encoding="utf-8")
    assert "not all of its runs" not in text
    for name in (*PICTURES, "league"):
        assert f"](systems/{name}.png)" in text
        assert (tmp_path / "systems" / f"{name}.png").stat().st_size > 5000
    for row in league.ROWS:
        assert text.count(f"| {row} |") == len(league.RATES)
    assert "| sparse | 61.1 | 2.73 | 3.000 3.000 | 12.3 12.3 | 0.020 |" in text  # (2 M / 500 + 2 M / 600) / 2 seconds
    for minutes in ("611.1 | 0.27", "61.1 | 2.73", "6.1 | 27.27"):  # in step: trained once, timed at every speed
        assert f"| sync | {minutes} |" in text
    assert "| downpour | never | | 4.000 4.000 |" in text
    assert "BLEU" in text


def test_a_run_that_lacks_its_beginning_counts_for_neither_time_nor_bytes(tmp_path: Path) -> None:
    everything(tmp_path / "runs")
    metrics = tmp_path / "runs" / "training" / league.setup("backup", "1 Gbit/s", 1).name / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    reports = [lines[-1].replace('"words": 2000000.0', f'"words": {words}') for words in (1_800_000, 1_900_000, 2_000_000)]
    metrics.write_text("".join([line.replace('"cross-entropy": 3', '"cross-entropy": 2') for line in lines[7:-1]] + reports))
    write(tmp_path / "runs", tmp_path / "systems.md", "scripts/reproduce/papers")
    text = (tmp_path / "systems.md").read_text(encoding="utf-8")
    assert re.search(r"\| backup \| [\d.]+ \(1 of 2 seeds\) \| [\d.]+ \| .* \| not known \|", text)


def test_the_page_says_what_is_missing(tmp_path: Path) -> None:
    write(tmp_path / "runs", tmp_path / "systems.md", "scripts/reproduce/papers")
    text = (tmp_path / "systems.md").read_text(encoding="utf-8")
    assert text.count("not all of its runs were made") == len(CLAIMS)
    assert "Not all runs of the league were made." in text


@pytest.mark.parametrize("setup", {setup.name: setup for setup in ALL}.values(), ids=lambda setup: setup.name)
def test_every_run_of_the_papers_is_one_that_the_simulator_takes(setup: Setup) -> None:
    options = dict(option.split("=", 1) for option in setup.options) | {"mode": setup.mode}
    changes = {key.removeprefix("cluster."): options.pop(key) for key in list(options) if key.startswith("cluster.")}
    room = cluster.load(ROOT / f"configs/clusters/{setup.cluster}.yml", changes)
    modes.check(configuration.load([str(ROOT / "configs/papers-virtual.yml")], options), room.ranks())


def test_every_run_of_the_papers_has_a_name_of_its_own() -> None:
    timed_names = [setup.name for setup in TIMED]
    assert len(set(timed_names)) == len(set(TIMED))
    assert len({setup.name for setup in TRAINED}) == len(set(TRAINED))
    assert not any(set(setup.name) & set("/ ") for setup in ALL)
