"""How scripts/tune compares systems: lines through validations, words of one machine with the same result, equal budgets."""

from __future__ import annotations

import argparse
import json
import math
import re
import runpy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from reproduce import bleu, codec_sensitivity
from reproduce.campaign import Job, side_by_side
from reproduce.comparison_page import page_of, table, times, write
from reproduce.comparison_pictures import scaling
from reproduce.comparison_tables import filled, judged
from reproduce.places import FAST, MACHINES, PLACES, SLOW, STRAGGLER
from reproduce.runs import crossing, fitted
from reproduce.systems import ALONE, SYSTEMS
from reproduce.trials import Trial, Trials
from reproduce.words_needed import write as write_words_needed

from nmt_train import config as configuration
from nmt_train.common.errors import UserError
from nmt_train.modes import resolve as modes
from nmt_train.simulation import cluster_file


def falling(values: list[float]) -> list[dict[str, float]]:
    """A validation every 100 words and 10 seconds."""
    return [{"words": 100 * n, "seconds": 10.0 * n, "cross-entropy": value} for n, value in enumerate(values, 1)]


def test_the_value_at_a_number_of_words_lies_on_the_line_through_five_validations() -> None:
    line = falling([9, 8, 7, 6, 5, 4, 3])
    assert fitted(line, 700) == pytest.approx(3)
    assert fitted(line, 600) == pytest.approx(4)
    noisy = falling([9, 8, 7, 6.5, 4.5, 4.5, 2.5])  # residuals of -0.5, 0.5 and so on around a line
    assert 2.5 < fitted(noisy, 700) < 3.2


def test_a_target_is_reached_when_the_line_reaches_it_and_not_a_single_lucky_validation() -> None:
    assert crossing(falling([9, 8, 7, 6, 5, 4, 3]), 4.0) == pytest.approx(60)
    assert crossing(falling([9, 8, 7, 6, 5, 4, 3]), 3.5) == pytest.approx(65)
    assert crossing(falling([9, 8, 3, 6, 5]), 3.5) == math.inf
    assert crossing(falling([9, 8, 7, 6]), 8) == math.inf  # four validations are no line
    assert crossing(falling([3, 3, 3, 3, 3, 3]), 4.0) == 10


def trial(system: str, words: int, seed: int = 0, *settings: str) -> Trial:
    return Trial(system, "1 Gbit/s", words, seed, settings)


def test_one_machine_is_the_measure(tmp_path: Path) -> None:
    trials = Trials(tmp_path / "none.csv")

    def ended(its: Trial, value: float, seconds: float) -> None:
        trials.found[its] = ends(its.words, seconds, value)

    ended(trial(ALONE, 500), 4.0, 5)
    ended(trial(ALONE, 500, 0, "rate=9"), 5.0, 5)  # tuned: the best settings of a length count
    ended(trial(ALONE, 1000), 3.0, 10)
    ended(trial(ALONE, 2000), 2.5, 20)
    assert [trials.alone_until(value, FAST) for value in (4.0, 3.0, 2.5)] == pytest.approx([500, 1000, 2000])
    assert trials.alone_until(2.75, FAST) == pytest.approx(1000 * math.sqrt(2))
    assert trials.alone_until(2.0, FAST) == pytest.approx(4000)
    assert trials.alone_until(2.0, FAST, "seconds") == pytest.approx(40)
    ended(trial("sync bf16", 2000), 3.0, 5)  # four times as fast, but as good as one machine after half the words
    assert trials.speedup(trial("sync bf16", 2000)) == pytest.approx(2.0)


def test_the_words_that_a_mode_needs_are_those_of_its_best_long_run(tmp_path: Path) -> None:
    trials = Trials(tmp_path / "none.csv")
    for its, value in (
        (trial(ALONE, 10**6), 3.0), (trial(ALONE, 2 * 10**6), 2.5), (trial("sparse-overlap", 10**6), 2.6),
        (trial("sparse-overlap", 2 * 10**6, 0, "rate=1"), 3.0), (trial("sparse-overlap", 2 * 10**6, 0, "rate=2"), 3.5),
        (trial("sparse-overlap", 2 * 10**6, 1, "rate=1"), 3.0), (trial("sparse-overlap", 2 * 10**6, 2, "rate=1"), 2.5),
        (trial("local-sgd", 10**6, 0, "plan=local.every=8,local.delay=8"), 3.0),
        (trial("local-sgd", 10**6, 0, "plan=local.every=8,local.delay=8,batch.tokens=224"), 2.5),
        *((replace(trial("local-sgd", 10**6, seed, "plan=local.every=8,local.delay=8"), place="100 Mbit/s"), value)
          for seed, value in enumerate((3.0, 3.0, 2.5))),
        (trial("low-bit", 10**6, 0, "plan=low_bit.up=2,low_bit.down=2,replicas.late_lookups=true"), 3.0),
        (trial("low-bit", 10**6, 0, "plan=low_bit.up=2,low_bit.down=2,replicas.late_lookups=false"), 2.5),
        (trial("low-bit", 10**6, 0, "plan=low_bit.up=3,low_bit.down=2,replicas.late_lookups=true"), 2.5),
    ):  # fmt: skip
        trials.found[its] = ends(its.words, its.words, value)
    best = trial("sparse-overlap", 2 * 10**6, 0, "rate=1").timing(tmp_path).finished
    best.parent.mkdir(parents=True)
    best.write_text(json.dumps({"ranks": [{"period": 2.0}, {"period": 4.0}]}))
    write_words_needed(trials, tmp_path, 1, tmp_path / "words.csv")
    _, local, low_bit, overlap = (tmp_path / "words.csv").read_text(encoding="utf-8").splitlines()
    assert local == 'local-sgd,replicas.codec=half local.every=8 local.delay=8,4,0.750,0.500,1.000,0.000,"1M words, 2 seeds"'
    assert low_bit == 'low-bit,low_bit.down=2,4,1.000,1.000,1.000,0.000,"1M words, 1 seed"', "with defaults but for this key"
    assert overlap == 'sparse-overlap,,4,1.500,1.000,2.000,3.000,"2M words, 2 seeds"'


def test_the_picture_of_several_machines_has_the_mean_and_the_range_of_each_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One machine halves its distance to 2 with twice the words; n machines need as many words, and 1 / n of the time."""
    trials, drawn = Trials(tmp_path / "none.csv"), list[Any]()
    for words in (1000, 2000):
        trials.found[replace(trial(ALONE, words), place=MACHINES[1])] = ends(words, words, 2 + 1000 / words)
    for machines in (2, 4):
        for seed in (0, 1, 2):
            its = replace(trial("low-bit", 2000, seed), place=MACHINES[machines])
            trials.found[its] = ends(2000, 2000 * (1 + 0.5 * (seed == 2)) / machines, 2.5)
    monkeypatch.setattr("reproduce.comparison_pictures.save_figure", lambda figure, output: drawn.append(figure.axes[0]))
    scaling(trials, tmp_path / "scaling.svg")
    linear, low_bit = drawn[0].lines
    assert [*linear.get_xdata()] == [*linear.get_ydata()] == [1, 4]
    assert [*low_bit.get_xdata()] == [1, 2, 4]
    assert [*low_bit.get_ydata()] == pytest.approx([1, (2 + 4 / 3) / 2, (4 + 8 / 3) / 2])
    assert {text.get_text().split("\n")[-1] for text in drawn[0].texts} >= {"batch 448", "low-bit", "linear"}
    ranges = [segment[:, 1].tolist() for segment in drawn[0].collections[0].get_segments()]
    assert ranges == [pytest.approx(sorted(pair)) for pair in ((4 / 3, 2), (8 / 3, 4))]


def ends(words: int, seconds: float, value: float) -> list[dict[str, float]]:
    """Five validations with the same cross-entropy."""
    return [{"words": words * n // 5, "seconds": seconds * n / 5, "cross-entropy": value} for n in range(1, 6)]


def test_the_file_keeps_every_validation(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    events = [{"event": "validation", "update": 1, **values} for values in falling([3, 2.5])]
    (run / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (run / "config.yml").write_text("precision: bf16\n")
    its = trial("sparse", 200, 3, "rate=0.003", "warmup=400")
    path = tmp_path / "new" / "trials.csv"
    Trials(path).add(its, run)
    Trials(path).add(trial(ALONE, 200), run)
    again = Trials(path)
    assert list(again.found) == [its, trial(ALONE, 200)]
    assert again.found[its] == [{**event, "precision": "bf16"} for event in falling([3, 2.5])]


def test_the_table_has_the_best_of_the_longest_runs_of_each_system(tmp_path: Path) -> None:
    trials = Trials(tmp_path / "none.csv")
    for its, value in (
        (trial(ALONE, 500), 4.0), (trial(ALONE, 1000), 3.0), (trial("sparse", 500), 5.0),
        (trial("sparse", 1000, 0, "rate=1"), 3.1), (trial("sparse", 1000, 1, "rate=1"), 3.2),
        (trial("sparse", 1000, 2, "rate=1"), 3.0), (trial("sparse", 1000, 1, "rate=2"), 4.0),
    ):  # fmt: skip
        speed = 100 if its.system == ALONE else 300
        trials.found[its] = [
            {"words": its.words * n // 5, "seconds": its.words / speed * n / 5, "cross-entropy": value + 0.1 * (5 - n)}
            for n in range(1, 6)
        ]
    _, _, alone, sparse = table(trials, FAST).splitlines()
    assert alone == "| one machine | 3.000 | 1.00 | 1.00 | 1.00 (1) | 1.00 | no |  |"
    assert sparse == "| sparse | 3.100 (3.000-3.200) | 3.00 | 0.94 | 2.81 (2.61-3.00) | 2.40 | no | rate=1 |"


def test_settings_are_left_out_where_they_are_those_of_1_gbit(tmp_path: Path) -> None:
    trials = Trials(tmp_path / "none.csv")
    for its in (trial(ALONE, 500), trial(ALONE, 1000), trial("strom", 1000, 0, "rate=1"), trial("low-bit", 1000, 0, "rate=1")):
        trials.found[its] = ends(its.words, its.words, 4000 / its.words)
    for system, rate in (("strom", 1), ("low-bit", 2)):
        its = replace(trial(system, 1000, 0, f"rate={rate}"), place=SLOW)
        trials.found[its] = ends(1000, 1000, 4.0)
    _, _, _, low_bit, strom = table(trials, SLOW).splitlines()
    assert (low_bit.split(" | ")[-1], strom.split(" | ")[-1]) == ("rate=2 |", " |")


def test_a_system_is_tuned_if_at_least_the_eight_settings_of_a_search_were_tried_with_seed_0(tmp_path: Path) -> None:
    trials, best = Trials(tmp_path / "none.csv"), trial("sparse", 1_000_000, 0, "rate=1")
    for number in range(1, 8):
        trials.found[trial("sparse", 500_000, 0, f"rate={number}")] = []
    for its in (best, trial("sparse", 1_000_000, 1, "rate=8"), replace(trial("sparse", 500_000, 0, "rate=9"), place=SLOW)):
        trials.found[its] = []
    assert trials.tuning(best) == "no"
    trials.found[trial("sparse", 500_000, 0, "rate=8")] = []
    assert trials.tuning(best) == "5M"


def test_the_late_target_is_what_one_machine_has_after_most_of_its_run_and_runs_are_as_long_as_they_need(
    tmp_path: Path,
) -> None:
    trials = Trials(tmp_path / "none.csv")

    def ended(its: Trial, last: float, seconds: float) -> None:
        """Falls by 0.1 in every twentieth of the run."""
        trials.found[its] = [
            {"words": its.words * n / 20, "seconds": seconds * n / 20, "cross-entropy": last + 0.1 * (20 - n)}
            for n in range(1, 21)
        ]

    for words, last in ((1_000_000, 3.0), (2_000_000, 2.5)):
        ended(trial(ALONE, words), last, words / 1000)
    with pytest.raises(UserError, match="no runs of one machine with other seeds"):
        trials.target(FAST)
    for seed, last in ((1, 2.4), (2, 2.6)):
        ended(trial(ALONE, 2_000_000, seed), last, 2000)
    assert trials.target(FAST) == pytest.approx(2.6)
    sparse = trial("sparse", 2_000_000)
    ended(sparse, 2.5 + 0.25, 500)  # as good as one machine after 1.41 million words
    longer = trials.until_target(sparse, 1)
    assert (longer.words, longer.seed) == (3_000_000, 1)  # 2 / 1.41 x 2 x 1.05 = 2.97
    ended(longer, 2.5, 750)
    assert times(trials, FAST).splitlines()[-1] == "| sparse | 3M | 712 (1) | 2.67 (1) |"
    ended(replace(longer, seed=2), 2.7, 750)
    row = times(trials, FAST).splitlines()[-1]
    assert row == "| sparse | 3M | missed by 1 of 2 runs |  |"
    ended(replace(sparse, seed=1, words=2_500_000), 2.5, 700)  # a shorter one of an earlier search is not shown
    assert times(trials, FAST).splitlines()[-1] == row
    ended(longer, 2.7, 750)
    assert times(trials, FAST).splitlines()[-1] == "| sparse | 3M | missed by 2 of 2 runs |  |"
    ended(replace(sparse, seed=1, words=8_000_000), 2.0, 2000)  # nor is one that shows what longer training gives
    assert times(trials, FAST).splitlines()[-1] == "| sparse | 3M | missed by 2 of 2 runs |  |"


def test_runs_of_equal_time_have_the_words_of_each_systems_own_speed(tmp_path: Path) -> None:
    trials = Trials(tmp_path / "none.csv")
    slow, fast = trial(ALONE, 2_000_000, 0, "rate=1"), trial("low-bit", 2_000_000, 0, "rate=2")
    trials.found |= {slow: ends(2_000_000, 1000, 2.0), fast: ends(2_000_000, 320, 2.0)}
    assert trials.lasting(slow, 320) == replace(slow, words=640_000)
    assert trials.lasting(fast, 320) == fast
    assert trials.lasting(fast, 160.1) == replace(fast, words=1_001_000), "in thousands"


def test_much_longer_runs_have_a_table_of_their_own_and_leave_the_others_as_they_are(tmp_path: Path) -> None:
    trials = Trials(tmp_path / "none.csv")
    for its, value in ((trial(ALONE, 1000), 4.0), (trial(ALONE, 2000), 3.0), (trial("sparse", 2000), 3.0)):
        trials.found[its] = ends(its.words, its.words, value)
    before = table(trials, FAST)
    assert "Longer runs" not in write(trials, FAST, tmp_path).read_text(encoding="utf-8")
    trials.found[trial(ALONE, 8000, 1)] = ends(8000, 8000, 1.0)
    trials.found[trial("sparse", 8000, 1)] = ends(8000, 2000, 2.0)  # as good as one machine after 4000
    assert table(trials, FAST) == before
    longer = write(trials, FAST, tmp_path).read_text(encoding="utf-8").partition("## Longer runs")[2]
    _, one, sparse = (line for line in longer.splitlines() if line.startswith("|") and "---" not in line)
    assert one.startswith("| one machine, 0.008M words | 1.000 | 1.00 | 1.00 | 1.00 (1) |")
    assert sparse.startswith("| sparse, 0.008M words | 2.000 | 4.00 | 0.50 | 2.00 (1) |")


def test_no_speedup_is_above_that_over_the_first_moment_at_which_a_run_of_one_machine_is_as_good(tmp_path: Path) -> None:
    trials = Trials(tmp_path / "none.csv")
    for words, value in ((1000, 4.0), (4000, 3.0)):
        trials.found[trial(ALONE, words)] = [
            {"words": at, "seconds": at, "cross-entropy": value + (words - at) / 1000} for at in range(200, words + 1, 200)
        ]
    sparse = trial("sparse", 4000)
    trials.found[sparse] = ends(4000, 1000, 3.5)
    assert trials.speedup(sparse) == pytest.approx(2.0)  # interpolated: 2,000 s
    assert trials.at_most(sparse) == pytest.approx(2.0), "no run of one machine falls to it sooner"
    for seed, fallen in ((0, 800), (1, 1400), (2, 1800)):  # seed 0 does not count, as the others are there
        trials.found[trial(ALONE, 4000, seed, "rate=9")] = [
            {"words": at, "seconds": at, "cross-entropy": max(3.2, 3.5 - (at - fallen) / 1000)} for at in range(200, 4001, 200)
        ]
    assert trials.at_most(sparse) == pytest.approx(1.6)


def test_a_page_has_the_tables_that_its_comments_name(tmp_path: Path) -> None:
    trials = Trials(tmp_path / "none.csv")
    for words, value in ((1000, 4.0), (2000, 3.0)):
        trials.found[replace(trial(ALONE, words), place=MACHINES[1])] = ends(words, words, value)
    trials.found[replace(trial("low-bit", 2000, 0, "plan=batch.tokens=448"), place=MACHINES[2])] = ends(2000, 1250, 3.0)
    page = "Before.\n\n<!-- tune:machines -->\n| older |\n<!-- end -->\nAfter.\n"
    now = filled(page, trials)
    assert "| 2 | `low-bit` | 448 | 1.60 | 1.00 | 1.60 | 0.80 |\n<!-- end -->\nAfter.\n" in now
    assert "older" not in now
    assert filled(now, trials) == now
    with pytest.raises(KeyError, match="machine"):
        filled(page.replace("machines", "machine"), trials)


def test_a_system_wins_by_each_of_its_models_and_is_ahead_by_both_means() -> None:
    """The first number of each model is its BLEU, the second minus its cross-entropy."""
    ours = [(27.0, -2.3), (28.0, -2.2)]
    for others, said in (
        ([(26.0, -2.5), (26.9, -2.4)], "wins"), ([(26.0, -2.5), (27.5, -2.4)], "is ahead"),
        ([(26.0, -2.1), (26.9, -2.0)], ""), ([(28.5, -2.5), (28.0, -2.4)], ""),
    ):  # fmt: skip
        assert judged(ours, others) == said


@pytest.mark.slow
def test_the_pages_of_the_comparison_are_those_of_its_files() -> None:
    """`scripts/tune` writes them again."""
    folder = ROOT / "docs" / "comparison"
    trials, page = Trials(folder / "trials.csv"), ROOT / "docs" / "comparison.md"
    text = page.read_text(encoding="utf-8")
    assert filled(text, trials) == text
    places = [place for place in PLACES if page_of(place, folder).exists()]
    assert len(places) == len(list(folder.glob("results-*.md")))
    for place in places:
        text = page_of(place, folder).read_text(encoding="utf-8")
        assert table(trials, place) in text
        assert times(trials, place) in text


@pytest.mark.slow
def test_without_a_system_all_pages_are_written_again_and_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["system,place,words,seed,settings,at,seconds,cross-entropy,precision"]
    for its in (trial(ALONE, 1000), trial(ALONE, 2000), trial("strom", 2000), replace(trial("strom", 2000), place=SLOW)):
        run = f"{its.system},{its.place},{its.words},0,"
        found = ends(its.words, its.words, 4000 / its.words)
        lines += [f"{run},{event['words']},{event['seconds']},{event['cross-entropy']},fp32" for event in found]
    path = tmp_path / "trials.csv"
    path.write_text("\n".join(lines), encoding="utf-8")
    page_of(SLOW, tmp_path).touch()
    monkeypatch.setattr("sys.argv", ["tune", "--output", str(path), "--folder", str(tmp_path / "runs")])
    main = runpy.run_path(str(ROOT / "scripts" / "tune"))["main"]
    monkeypatch.setitem(main.__globals__, "prepare", lambda *_: pytest.fail("no corpus is needed"))
    assert main() == 0
    assert sorted(page.name for page in tmp_path.glob("*.md")) == ["results-100Mbits.md", "results-1Gbits.md"]
    assert "| strom | 2.000 |" in page_of(SLOW, tmp_path).read_text(encoding="utf-8")
    assert not (tmp_path / "runs").exists()


def test_words_are_those_that_a_run_had_not_those_that_were_wanted(tmp_path: Path) -> None:
    """Runs with few exchanges end with the exchange in flight, later than they should."""
    trials = Trials(tmp_path / "none.csv")
    for words, value in ((500, 4.0), (1000, 3.0)):
        trials.found[trial(ALONE, words)] = [{"words": words * n / 5, "seconds": n, "cross-entropy": value} for n in (4, 5)]
    trials.found[trial("diloco", 1000)] = [{"words": words, "seconds": 1, "cross-entropy": 3.0} for words in (1000, 1250)]
    assert "| 0.80 |" in table(trials, FAST).splitlines()[-1]


def test_a_run_with_a_single_exchange_ends_with_its_only_validation(tmp_path: Path) -> None:
    trials = Trials(tmp_path / "none.csv")
    its = trial("diloco", 1000)
    trials.found[its] = [{"words": 1250, "seconds": 7.0, "cross-entropy": 4.1}]
    assert trials.end(its) == 4.1


def test_where_workers_wait_for_each_other_a_network_changes_only_times(tmp_path: Path) -> None:
    """So a run at another network needs no training: its times are scaled by words/s."""
    trials = Trials(tmp_path / "trials.csv")
    found, async_ = trial("sparse-local", 2000, 0, "rate=1"), trial("sparse-overlap", 2000, 0, "rate=1")
    its = [{**event, "precision": "fp32"} for event in falling([9, 8])]
    for known in (found, async_):
        trials.found[known] = its
    slow = replace(found, place=SLOW)
    assert trials.twin(slow) == trials.twin(replace(found, place=STRAGGLER)) == found
    others = (replace(slow, seed=1), replace(slow, settings=("rate=2",)), replace(async_, place=SLOW))
    assert [trials.twin(other) for other in (*others, replace(found, place="thesis 4x2"))] == [None] * 4
    for each, pace in ((found, 300), (slow, 200)):
        timing = each.timing(tmp_path).finished
        timing.parent.mkdir(parents=True)
        timing.write_text(json.dumps({"words_per_second": pace}))
    trials.retime(slow, found, tmp_path)
    assert trials.found[slow] == [{**event, "seconds": event["seconds"] * 1.5} for event in its]
    assert list(Trials(tmp_path / "trials.csv").found) == [slow]


def test_variants_differ_in_one_setting_and_go_beyond_the_first_search() -> None:
    settings = ("rate=0.003", "warmup=200", "beta1=0.8", "floor=1", "plan=local.every=8,local.delay=0")
    variants = partial(SYSTEMS["local-sgd"].variants, settings)
    assert [its[0] for its in variants("rate")] == ["rate=0.002", "rate=0.0045"]
    assert [its[1] for its in variants("warmup")] == ["warmup=100", "warmup=400"]
    assert [its[2] for its in variants("beta1")] == ["beta1=0.7", "beta1=0.9"]
    assert [its[3] for its in variants("floor")] == ["floor=0.3", "floor=0"]
    assert [its[4].count("every") for its in variants("plan", SLOW)] == [1] * 4
    assert all(its[1:] == settings[1:] for its in variants("rate"))
    assert SYSTEMS["sparse"].variants(settings[:4], "plan") == []


def test_other_batches_come_with_their_rate_and_with_both_counts_of_local_steps() -> None:
    settings = ("rate=0.004", "warmup=200", "beta1=0.8", "floor=1")
    assert SYSTEMS[ALONE].batches(settings, 448) == [
        ("rate=0.002828", *settings[1:], "plan=batch.tokens=224"),
        ("rate=0.005657", *settings[1:], "plan=batch.tokens=896"),
    ]
    batches = partial(SYSTEMS["sparse-local"].batches, tokens=448)
    plan = "plan=local.every={},local.delay=1,tiles.keep=30,batch.tokens={}"
    assert [its[4] for its in batches((*settings, plan.format(1, 448)))] == [
        plan.format(1, 224), plan.format(2, 224).replace("delay=1", "delay=2"), plan.format(1, 896)
    ]  # fmt: skip
    assert SYSTEMS["sync bf16"].batches((*settings, "plan=batch.accumulate=2"), 448) == []


def test_refining_finds_better_values_one_by_one_and_then_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, each setting has a best value, and none depends on the others."""
    refine = runpy.run_path(str(ROOT / "scripts" / "tune"))["refine"]
    wanted = {"rate": 0.0045, "warmup": 100, "beta1": 0.9, "floor": 0, "plan": 144, "batch": 448}
    trials = Trials(tmp_path / "none.csv")
    for words, value in ((500, 5.0), (1000, 4.0), (2000, 3.0)):
        trials.found[trial(ALONE, words)] = [{**each, "seconds": float(words)} for each in falling([value] * 5)]
    lengths = list[int]()

    def run(its: list[Trial], *_: object) -> None:
        for each in its:
            if each not in trials.found:
                values = dict(setting.split("=", 1) for setting in each.settings)
                values["batch"] = (re.findall(r"batch\.tokens=(\d+)", values["plan"]) or [448])[0]
                values["plan"] = values["plan"].split(",")[0].split("=")[1]
                missed = sum(abs(math.log((float(values[key]) + 1e-3) / (best + 1e-3))) for key, best in wanted.items())
                trials.found[each] = falling([3 + 0.1 * missed] * 5)
                lengths.append(each.words)

    monkeypatch.setitem(refine.__globals__, "run", run)
    plan = "plan=local.every=72,local.delay=72"
    first = Trial("local-sgd", SLOW, 2000, 0, ("rate=0.003", "warmup=200", "beta1=0.8", "floor=1", plan))
    run([first])
    best = refine(first, trials, tmp_path, 1)
    assert best.settings == ("rate=0.0045", "warmup=100", "beta1=0.9", "floor=0", "plan=local.every=144,local.delay=72")
    assert best.words == 2000
    assert {length: lengths.count(length) for length in (500, 1000, 2000)} == {500: 4, 1000: 13, 2000: 6}
    assert refine(first, trials, tmp_path, 1) == best
    assert len(lengths) == 23, "known trials are not run again"


def test_settings_can_be_given() -> None:
    tune = runpy.run_path(str(ROOT / "scripts" / "tune"))
    assert tune["settings"]("rate=0.006 floor=0.3 plan=a=1,b=2") == ("rate=0.006", "floor=0.3", "plan=a=1,b=2")
    for system in SYSTEMS.values():
        settings = system.candidates(1)[0]
        assert tune["settings"](" ".join(settings)) == settings, "whatever is searched can be given"
    for text, said in (
        ("rate=0.006 floor", "'floor' is not of the form key=value"),
        ("floor=1", "rate=, the learning rate, is"),
        ("rate=0.006 plan=low_bit.up", "'low_bit.up' is not of the form key=value"),
        ("rate=0.006 warmup=1e2", "warmup: '1e2' is not a number"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=said):
            tune["settings"](text)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([ALONE, "--settings", "rate=0.006", "--refine"], "with --settings, nothing is varied"),
        (["strom", "--place", "jitter", "--refine"], "at 'jitter', which has the settings of '1 Gbit/s', nothing is varied"),
        (["--seeds"], "--seeds: needs a SYSTEM"),
        (["low-bit", "--longer", "4e6"], "--longer: needs more than 4e+06 words, twice those of the longest trials"),
        (["low-bit", "--place", "tatoeba 4", "--bleu"], "--bleu: is for places with the corpus of configs/comparison-virtual"),
        (["low-bit", "--place", "tatoeba 4", "--equal-time", "9"], "--equal-time: is for places with the corpus of configs/"),
        (["low-bit", "--equal-time", "0"], "--equal-time 0: needs a finite number of seconds above 0"),
        (["--equal-time", "300"], "--equal-time: needs a SYSTEM"),
        (
            ["low-bit", "--settings", "rate=0.006 pipeline.warmup=25"],
            "--settings: 'low-bit' has rate, warmup, beta1, floor and plan (plan=KEY=VALUE,KEY=VALUE), not 'pipeline.warmup'",
        ),
        ([ALONE, "--jobs", "0"], "argument --jobs: 0 is not between 1 and"),
    ],
)
def test_options_without_effect_are_refused_before_anything_runs(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tune", *arguments])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "scripts" / "tune"))["main"]()
    assert said in capsys.readouterr().err


def test_refining_can_begin_with_any_numbers() -> None:
    system = SYSTEMS["sync bf16"]
    odd = system.variants(("rate=0.006", "warmup=25", "beta1=0.6"), "warmup")
    assert [each[1] for each in odd] == ["warmup=12.5", "warmup=50"]
    assert "--optimizer.warmup=12" in trial("sync bf16", 2_000_000, 0, *odd[0]).job(Path("runs")).command
    assert [each[2] for each in system.variants(odd[0], "beta1")] == ["beta1=0.5", "beta1=0.7"]
    with_batch = SYSTEMS["strom"].with_last_plans(("rate=0.002", "plan=threshold.density=0.01,batch.tokens=224"), "1 Gbit/s")
    assert with_batch[0][1] == "plan=threshold.density=0.003,batch.tokens=224"


def test_refining_ends_with_the_last_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refine = runpy.run_path(str(ROOT / "scripts" / "tune"))["refine"]
    trials = Trials(tmp_path / "none.csv")
    for words, value in ((500, 5.0), (1000, 4.0), (2000, 3.0)):
        trials.found[trial(ALONE, words)] = [{**each, "seconds": float(words)} for each in falling([value] * 5)]

    def run(its: list[Trial], *_: object) -> None:
        for each in its:
            trials.found[each] = falling([2.9 if "plan=threshold.density=0.03" in each.settings else 3.0] * 5)

    monkeypatch.setitem(refine.__globals__, "run", run)
    first = trial("strom", 2000, 0, "rate=0.002", "warmup=800", "beta1=0.15", "floor=1")
    run([first])
    assert refine(first, trials, tmp_path, 1) == replace(first, settings=(*first.settings, "plan=threshold.density=0.03"))
    plans = [each.settings[-1] for each in trials.found if each.settings and "density" in each.settings[-1]]
    assert plans == [f"plan=threshold.density={share}" for share in (0.003, 0.03, 0.1)], "each once, with the best settings"


def test_cheaper_codecs_change_only_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, a codec as charged takes as long as everything else."""
    trials, output = Trials(tmp_path / "none.csv"), tmp_path / "page.md"
    trials.found[trial(ALONE, 1000)] = ends(1000, 10, 4.0)
    trials.found[trial(ALONE, 2000)] = ends(2000, 20, 3.0)
    plan = "plan=low_rank.rank=8,low_rank.dense_updates=0"
    trials.found[trial("low-bit", 2000)] = ends(2000, 10, 3.0)
    trials.found[trial("powersgd", 2000, 0, plan)] = ends(2000, 16, 3.0)

    def side_by_side(jobs: list[Job], _: int) -> None:
        for job in jobs:
            options = dict(
                str(part)[2:].split("=", 1) for part in job.command if str(part).startswith("--") and "=" in str(part)
            )
            its = cluster_file.load(
                ROOT / PLACES[FAST].cluster, {k.removeprefix("cluster."): v for k, v in options.items() if "cluster." in k}
            )
            cost = its.device.codecs["low-bit"].encode.per_unit / 0.34e-9
            assert its.device.encode.per_unit == pytest.approx(0.15e-9 * cost)
            pace = (2 if options.get("low_rank.rank") == "2" else 1) / (1 + cost)
            job.finished.parent.mkdir(parents=True, exist_ok=True)
            job.finished.write_text(json.dumps({"words_per_second": pace}))

    monkeypatch.setattr(codec_sensitivity, "side_by_side", side_by_side)
    codec_sensitivity.write(trials, tmp_path, 1, output)
    assert [line for line in output.read_text().splitlines() if line.startswith("| 1 Gbit/s")] == [
        "| 1 Gbit/s | `low-bit` | 2.00 | 2.67 | 4.00 |",
        "| 1 Gbit/s | `powersgd` | 1.25 | 1.67 | 2.50 |",
        "| 1 Gbit/s | `powersgd`, bytes of a large model | 2.50 | 3.33 | 5.00 |",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "place"),
    [
        (name, place)
        for name in SYSTEMS
        for place, its in PLACES.items()
        if (place == its.alone if name == ALONE else its.workers > 1 and (place == FAST or place in SYSTEMS[name].plans))
    ],
)
def test_every_system_has_as_many_trials_and_each_is_a_valid_run(name: str, place: str, tmp_path: Path) -> None:
    found = SYSTEMS[name].candidates(8, place)
    assert len(set(found)) == 8
    assert found == SYSTEMS[name].candidates(8, place)
    for settings in found:
        job = Trial(name, place, 500_000, 0, settings).job(tmp_path)
        command = [str(part) for part in job.command]
        mode = command[command.index("--mode") + 1]
        given = [part.split("=")[0] for part in command if part.startswith("--")]
        assert len(set(given)) == len(given), "no option is given twice"
        options = dict(part[2:].split("=", 1) for part in command if part.startswith("--") and "=" in part)
        of_cluster = {key.removeprefix("cluster."): value for key, value in options.items() if key.startswith("cluster.")}
        its = {key: value for key, value in options.items() if key not in ("cluster." + part for part in of_cluster)}
        config = configuration.load([str(ROOT / PLACES[place].config)], {**its, "mode": mode})
        machines = cluster_file.load(ROOT / PLACES[place].cluster, of_cluster)
        now = modes.resolve(config, machines.ranks())
        warmup = next(int(part.split("=")[1]) for part in settings if part.startswith("warmup="))
        share = PLACES[place].tokens / config.batch.tokens  # of smaller batches, there are more
        assert now.optimizer.warmup == round(share * warmup / 4 * PLACES[place].updates(SYSTEMS[name].singly))
        assert SYSTEMS[name].singly or len(machines.ranks()) == PLACES[place].workers
        assert str(now.optimizer.cosine_until) == "500000t"


@pytest.mark.slow
def test_a_run_that_a_signal_from_elsewhere_ended_does_not_count_as_finished(tmp_path: Path) -> None:
    jobs = [
        Job(tmp_path / name, ("sh", "-c", command), tmp_path / f"{name}.finished")
        for name, command in (("whole", "true"), ("killed", "kill -TERM $$"))
    ]
    with pytest.raises(SystemExit, match="killed failed"):
        side_by_side(jobs, 1)
    assert [job.finished.exists() for job in jobs] == [True, False]


@pytest.mark.slow
def test_a_run_that_has_enough_is_ended_and_finished(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    job = Job(
        tmp_path / "long",
        ("sh", "-c", f"trap 'exit 143' TERM; touch {ready}; while true; do sleep 0.1; done"),
        tmp_path / "done",
    )
    side_by_side([job], 1, enough=lambda job: ready.exists())
    assert job.finished.exists()


def test_bleu_is_measured_once_per_run(tmp_path: Path) -> None:
    output, its = tmp_path / "bleu.csv", [trial("low-bit", 500, seed, "rate=1", "beta1=0.7") for seed in (1, 2)]
    for number, one in enumerate(its):
        trained = one.job(tmp_path)
        trained.run.mkdir(parents=True)
        trained.finished.touch()
        found = tmp_path / "bleu" / f"{trained.run.name}.json"
        found.parent.mkdir(exist_ok=True)
        found.write_text(json.dumps({"bleu": 20 + number, "cross-entropy": 2.5}))
    bleu.measure(its[:1], tmp_path, 1, output)
    bleu.measure(its, tmp_path, 1, output)
    assert output.read_text().splitlines()[1:] == [
        "low-bit,1 Gbit/s,500,1,rate=1 beta1=0.7,20.00,2.5000", "low-bit,1 Gbit/s,500,2,rate=1 beta1=0.7,21.00,2.5000"
    ]  # fmt: skip
    with pytest.raises(UserError, match="test set"):
        bleu.measure([replace(its[0], place="tatoeba 4")], tmp_path, 1, output)
