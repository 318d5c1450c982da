"""nmt-simulate --compare: which mode learns the same model soonest on a cluster."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import Make, small
from virtual import cluster

from nmt_train import config as configuration
from nmt_train.common.errors import UserError
from nmt_train.config import Config
from nmt_train.modes import resolve as modes
from nmt_train.modes.auto import AUTO, with_mode
from nmt_train.modes.table import MODES
from nmt_train.report.figure import look
from nmt_train.simulation.adviser import auto
from nmt_train.simulation.adviser.auto import AutoAdviser
from nmt_train.simulation.adviser.compare import Comparison, Row, choices, compare, part_of, sizes
from nmt_train.simulation.adviser.words_needed import ONE, Choice, Needed, measured
from nmt_train.simulation.cluster import (
    Card,
    ClusterConfig,
    Cost,
    Crash,
    DeviceConfig,
    LinkConfig,
    ScaleConfig,
    Straggler,
)
from nmt_train.simulation.cluster_file import described
from nmt_train.training.prepared_run import opened

pytestmark = pytest.mark.slow

DEVICE = DeviceConfig(forward=Cost(0.0, 1e-3), backward=Cost(0.0, 2e-3), update=Cost(0.0, 1e-10))
FOUR = Choice("sync", {"replicas.codec": "bf16"}, 4, Needed(1.6, 1.3, 1.9))


def machines(bandwidth: str, nodes: list[int] | None = None) -> ClusterConfig:
    link = LinkConfig(bandwidth, "0.1ms")
    scale = ScaleConfig("60M")
    return cluster(nodes or [1, 1, 1], DEVICE, network=link, inside=link, scale=scale, crashes=[Crash(0, "1s")])


FEW = ("single", "sync", "sparse-local")
SOME = (*FEW, "low-bit", "overlap", "vanilla", "strom")  # all kinds, and some of unknown words


def compared(config: Config, given: ClusterConfig, some: Sequence[str] = FEW) -> Comparison:
    wanted = [(choice, machines) for machines in sizes(given) for choice in choices() if choice.mode in some]
    return compare(config, given, [(60, 100)], [400, 500, 600], wanted)


@pytest.fixture(scope="module")
def gigabit(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    config = configuration.validate(small(demo, tmp_path_factory.mktemp("gigabit")), {})
    return compared(config, machines("1 Gbit/s", [1, 1]), SOME)


def test_one_worker_needs_what_one_worker_needs() -> None:
    assert FOUR.on(1) == ONE
    assert FOUR.on(4) == FOUR.needed
    assert Choice("vanilla", {}).on(4) is None


@pytest.mark.parametrize("workers", [2, 3, 8, 16])
def test_what_more_workers_need_grows_with_their_number_and_becomes_less_certain(workers: int) -> None:
    found = FOUR.on(workers)
    assert found is not None
    assert found.words == pytest.approx(1 + 0.6 * (workers - 1) / 3)
    assert found.low < found.words < found.high
    assert (found.high - found.low) / (found.words - 1) > (1.9 - 1.3) / 0.6


@pytest.mark.parametrize("workers", [2, 8, 64, 1000])
def test_what_fewer_words_were_needed_for_does_not_grow_with_the_workers(workers: int) -> None:
    found = Choice("sync", {}, 4, Needed(0.96, 0.9, 1.02)).on(workers)
    assert found is not None
    assert 0.9 <= found.low <= found.words <= found.high
    assert 0.96 <= found.words < 1


def test_everything_that_is_compared_is_a_valid_choice(make: Make) -> None:
    for choice in choices():
        nodes = (0,) if choice.mode == "single" else (0, 1, 2, 3)
        config = with_mode(make(batch__accumulate=3, stop__after="3e"), choice.mode, choice.settings)
        assert modes.resolve(config, nodes).workers == len(nodes)
    assert {"sync", "powersgd", "sparse-local", "local-sgd"} <= {choice.mode for choice in measured()}


def test_a_fast_network_makes_all_machines_pay_and_a_slow_one_none(make: Make) -> None:
    quick, slow = (compared(make(), machines(bandwidth, [1, 1])) for bandwidth in ("100 GB/s", "1 kB/s"))
    assert quick.best.machines == 2
    assert quick.advice().startswith("Use --mode sync")
    assert "on all 2 machines" in quick.advice()
    assert quick.advice().count("sync") == 1
    assert slow.best.machines == 1
    assert slow.advice() == "Use one machine (--mode single): more do not pay here."


def test_rows_are_sorted_by_how_soon_they_learn_the_same(gigabit: Comparison) -> None:
    speedups = [row.speedup[0] for row in gigabit.rows if row.speedup]
    assert speedups == sorted(speedups, reverse=True)
    unknown = [row.speedup is None for row in gigabit.rows]
    assert unknown == sorted(unknown), "those whose words are not known come last"
    assert len({*unknown}) == 2
    one = next(row for row in gigabit.rows if row.machines == 1)
    assert one.speedup == (1.0, 1.0, 1.0)


def test_a_machine_of_several_devices_is_measured_by_its_best_mode(make: Make) -> None:
    found = compared(make(), machines("10 GB/s", [2, 2]))
    assert max(row.speedup[0] for row in found.rows if row.machines == 1 and row.speedup) == pytest.approx(1.0)
    assert {row.workers for row in found.rows} == {2, 4}


def test_further_machines_must_be_worth_it() -> None:
    rows = [
        Row(FOUR, machines, machines, speed, 0.0, 5e9, ONE, 100.0)
        for machines, speed in ((8, 412.0), (4, 400.0), (2, 200.0), (1, 100.0))
    ]
    found = Comparison(rows, {"strom": "does not work"})
    assert found.best.machines == 4
    assert "on 4 machines; more do not pay: 4.00 (4.00 to 4.00) times one machine" in found.advice()
    assert "not compared: strom: does not work" in found.table()


def test_of_modes_that_are_about_as_fast_the_one_that_needs_fewest_words_is_recommended() -> None:
    rows = [
        Row(Choice(mode, {}), 4, 4, speed, 0.0, 5e9, Needed(words, words, words), 100.0)
        for mode, speed, words in (("sparse-local", 440.0, 1.1), ("sync", 396.0, 1.0), ("diloco", 340.0, 0.9))
    ]
    assert Comparison(rows, {}).best.choice.mode == "sync"


def test_what_does_not_fit_in_memory_is_not_recommended() -> None:
    rows = [Row(FOUR, 4, 4, 400.0, 0.0, 20e9, ONE, 100.0), Row(FOUR, 4, 4, 300.0, 0.0, 10e9, ONE, 100.0)]
    assert Comparison(rows, {}).best is rows[0]
    assert Comparison(rows, {}, memory=16e9).best is rows[1]
    assert "(not enough memory)" in Comparison(rows, {}, memory=16e9).table()
    other = Row(Choice("local-sgd", {}), 4, 4, 300.0, 0.0, 10e9, ONE, 100.0)
    assert "sync" in Comparison([rows[1], other], {}).advice()
    assert "sync" not in Comparison([rows[0], other], {}, memory=16e9).advice()
    with pytest.raises(UserError, match="memory: 1 GB of each device are not enough for any mode: .* 10 GB are needed"):
        Comparison(rows, {}, memory=1e9).advice()


def test_the_table_the_json_and_the_picture_say_the_same(gigabit: Comparison, tmp_path: Path) -> None:
    gigabit.write(tmp_path)
    values = json.loads((tmp_path / "compare.json").read_text(encoding="utf-8"))
    assert values["advice"] == gigabit.advice()
    assert len(values["rows"]) == len(gigabit.rows) == len(gigabit.table().splitlines()) - 1 - len(gigabit.refused)
    assert (tmp_path / "compare.png").stat().st_size > 5000


def test_in_the_picture_every_mode_has_its_own_look_or_is_gray_and_has_a_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = list[Any]()
    monkeypatch.setattr("nmt_train.simulation.adviser.compare.save_figure", lambda figure, path: drawn.append(figure.axes[0]))
    rows = [
        Row(Choice(mode, {}), machines, machines, 100.0 * machines, 0.0, 5e9, ONE, 100.0)
        for mode in MODES for machines in (2, 4)
    ]  # fmt: skip
    Comparison(rows, {}).write(tmp_path)
    (axes,) = drawn
    lines = [line for line in axes.lines if len(line.get_xdata()) == 2 and list(line.get_xdata()) == [2, 4]]
    assert {text.get_text() for text in axes.texts} == set(MODES)
    assert sorted(line.get_color() for line in lines) == sorted(look(mode)["color"] for mode in MODES)


def test_a_part_of_a_cluster_keeps_what_belongs_to_its_machines() -> None:
    whole = cluster(
        [1, 2, 1, 2], DEVICE, stragglers=[Straggler(2, 3.0), Straggler(5, 4.0)], cards=[Card(0, "1 MB/s"), Card(3, "2 MB/s")],
        crashes=[Crash(0, "1s")],
    )  # fmt: skip
    left = part_of(whole, [0, 2, 0, 1])
    assert left.nodes == [2, 1]
    assert left.stragglers == [Straggler(1, 3.0)], "the other slow device is not in it"
    assert left.cards == [Card(1, "2 MB/s")]
    assert left.crashes == []
    assert part_of(whole, whole.nodes) == cluster([1, 2, 1, 2], DEVICE, stragglers=whole.stragglers, cards=whole.cards)


@pytest.fixture
def adviser(make: Make) -> AutoAdviser:
    config = make(mode=AUTO, batch__accumulate=3)
    with opened(config, False, False) as ready:
        return AutoAdviser(config, ready.vocabulary, ready.stores)


def test_auto_chooses_the_best_mode_for_all_machines(adviser: AutoAdviser, make: Make, tmp_path: Path) -> None:
    fast, slow = (adviser.choose(described(machines(bandwidth, [1, 1]))) for bandwidth in ("100 GB/s", "2 kB/s"))
    assert fast.config == with_mode(make(), "sync", {"replicas.codec": "bf16"})
    assert any("chose --mode sync" in sentence and "times one machine" in sentence for sentence in fast.sentences)
    assert slow.config.mode not in ("sync", "single"), "all machines are there to be used"
    assert re.fullmatch(r"warning: one machine alone would be \d+\.\d times as fast", slow.sentences[-1])
    fast.write(tmp_path)
    assert {"compare.json", "compare.png"} <= {path.name for path in tmp_path.iterdir()}


def test_one_machine_is_not_said_to_be_faster_if_it_is_about_as_fast() -> None:
    said = [auto._alone(estimate) for estimate in (0.5, 0.94, 0.97, 1.03)]
    assert said == ["2.0 times as fast", "1.1 times as fast", *["nearly as fast, or as fast"] * 2]


def test_auto_on_the_devices_of_one_machine(adviser: AutoAdviser) -> None:
    advice = adviser.choose(described(machines("100 GB/s", [2])))
    assert advice.config.mode == "sync"
    assert "words/s" in advice.sentences[-1]


def test_auto_says_how_its_choice_compares_on_the_machines_that_are_left(adviser: AutoAdviser, make: Make) -> None:
    text = described(machines("100 GB/s"))
    best = adviser.choose(text).config
    assert adviser.compare(text, [1, 0, 1], best).startswith("with 2 devices, sync is still the best mode: ")
    other = adviser.compare(text, [1, 0, 1], make(mode="strom"))
    assert "sync would be best (" in other
    assert other.endswith(
        "training continues with strom: to change, stop it and start it again with --mode sync --replicas.codec bf16"
    )
    slower = adviser.compare(text, [1, 0, 1], make(mode="sync", replicas__codec="bf16", batch__accumulate=2))
    assert slower.endswith("with --mode sync --replicas.codec bf16 --batch.accumulate 1 --force")
    for devices in ([1, 1], [2, 1, 1]):
        assert adviser.compare(text, devices, best).startswith("these are not the machines that were measured")
    for damaged in (text.replace("nodes", "knots"), "nodes: [1"):
        assert adviser.compare(damaged, [1, 0, 1], best).startswith("machines.yml: not a cluster file of this version (")


def test_only_choices_that_may_be_the_best_are_simulated_if_there_is_little_time(make: Make) -> None:
    given = machines("1 Gbit/s")
    wanted = [(choice, number) for number in (1, 3) for choice in (Choice("single", {}), *measured()[::2])]
    whole = compare(make(), given, [(60, 100)], [400, 500, 600], wanted)
    quick = compare(make(), given, [(60, 100)], [400, 500, 600], wanted, longest=60.0)
    assert quick.best_on(3) == whole.best_on(3)
    assert len(quick.rows) < len(whole.rows) / 2
    hurried = compare(make(), given, [(60, 100)], [400, 500, 600], wanted, longest=0.0)
    assert [row.machines for row in sorted(hurried.rows, key=lambda row: row.machines)] == [1, 3]


def test_no_choice_is_left_out_because_the_first_machine_is_slow(make: Make) -> None:
    given = dataclasses.replace(machines("10 GB/s"), stragglers=[Straggler(0, 4.0)], crashes=[])
    wanted = [(choice, machines) for machines in (1, 3) for choice in (Choice("single", {}), *measured()[::2])]
    whole, quick = (compare(make(), given, [(60, 100)], [400, 500, 600], wanted, longest=its) for its in (math.inf, 60.0))
    assert quick.best_on(3).choice == whole.best_on(3).choice  # type: ignore[union-attr]


def test_a_mode_whose_workers_would_never_exchange_is_refused(make: Make) -> None:
    rare = Choice("local-sgd", {"local.every": "50"}, 4, Needed(1.5, 1.4, 1.6))
    wanted = [(Choice("single", {}), 1), (rare, 3)]
    found = compare(make(stop__after="2e"), machines("1 Gbit/s"), [(60, 100)], [400, 500, 600], wanted)
    assert "local.every: 50 steps are more than each of 3 workers makes" in found.refused[rare.name]
