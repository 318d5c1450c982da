"""`mode: auto`: which rank decides when, and what the other ranks then know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Make
from virtual import engine, together

from nmt_train.config import Config, plain
from nmt_train.modes.auto import AUTO, with_mode
from nmt_train.run.checkpoint import Checkpoint
from nmt_train.run.folder import MACHINES
from nmt_train.simulation.virtual_transport import VirtualTransport
from nmt_train.training.auto_mode import Advice, ChosenMode, follow, lead

CPU = torch.device("cpu")
SETTINGS = {"local.every": "3"}


@dataclass
class Fake:
    """An adviser that always chooses sparse-local, and remembers what it was asked."""

    config: Config
    measured: int = 0
    compared: list[tuple[str, list[int], str | None]] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Write nothing."""

    def measure(self, transport: VirtualTransport, own: torch.device, make: Any) -> str:
        self.measured += 1
        return "" if transport.rank else "the machines"

    def choose(self, cluster: str) -> Advice:
        assert cluster.endswith("the machines")
        return Advice(with_mode(self.config, "sparse-local", SETTINGS), ["it is fast"], self.write)

    def compare(self, cluster: str, devices: Sequence[int], config: Config) -> str:
        self.compared.append((cluster.splitlines()[-1], list(devices), config.mode))
        return "compared"


def no_worker(*given: Any) -> Any:
    raise AssertionError("the adviser of this test needs no workers")


def saved(config: Config, ranks: int) -> Checkpoint:
    facts = {"config": plain(config), "stages": [[{}] * ranks]}
    return SimpleNamespace(facts=facts)  # type: ignore[return-value]


def chosen(config: Config, run: Path, nodes: Sequence[int], before: Checkpoint | None = None) -> list[tuple[ChosenMode, Fake]]:
    """What each rank knows, and its adviser."""

    def one(transport: VirtualTransport) -> tuple[ChosenMode, Fake]:
        fake = Fake(config)
        if transport.rank:
            return follow(config, transport, CPU, no_worker, fake), fake
        return lead(config, transport, CPU, no_worker, fake, before, run), fake

    return together(engine(nodes), *[one] * sum(nodes))


def test_all_ranks_of_a_new_run_measure_and_get_the_same_choice(make: Make, tmp_path: Path) -> None:
    config = make(mode=AUTO, replicas__buckets=3)
    found = chosen(config, tmp_path, [1, 2])
    assert [fake.measured for _, fake in found] == [1, 1, 1]
    assert {choice.config.mode for choice, _ in found} == {"sparse-local"}
    assert all(choice.config == with_mode(config, "sparse-local", SETTINGS) for choice, _ in found)
    assert {choice.cluster for choice, _ in found} == {"# node0 x 1, node1 x 2\nthe machines"}
    found[0][0].write(tmp_path)
    assert (tmp_path / MACHINES).read_text(encoding="utf-8") == "# node0 x 1, node1 x 2\nthe machines"
    said = found[0][0].sentences
    assert said == ["it is fast", "ignores replicas.buckets: each mode is compared with settings of its own"]


def test_a_picture_that_cannot_be_drawn_does_not_end_training(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(its: Fake, folder: Path) -> None:
        raise ValueError("no backend")

    monkeypatch.setattr(Fake, "write", fails)
    choice = chosen(make(mode=AUTO), tmp_path, [1, 1])[0][0]
    choice.write(tmp_path)
    assert "the comparison of the modes was not written: no backend" in capsys.readouterr().err
    assert (tmp_path / MACHINES).exists()


def test_one_rank_trains_in_mode_single_without_measuring(make: Make, tmp_path: Path) -> None:
    ((choice, fake),) = chosen(make(mode=AUTO), tmp_path, [1])
    assert choice.config.mode == "single"
    assert fake.measured == 0


def test_one_rank_keeps_the_accumulated_batches(make: Make, tmp_path: Path) -> None:
    ((choice, _),) = chosen(make(mode=AUTO, batch__accumulate=4), tmp_path, [1])
    assert choice.config == make(mode="single", batch__accumulate=4)


@pytest.mark.parametrize(("then", "measured"), [([1, 1], 0), ([2], 1)], ids=["the same machines", "others"])
def test_a_run_that_has_begun_keeps_its_mode_and_measures_only_other_machines(
    make: Make, tmp_path: Path, then: list[int], measured: int
) -> None:
    chosen(make(mode=AUTO), tmp_path, then)[0][0].write(tmp_path)
    before = saved(make(mode="pipe", pipeline__width=3), 2)
    found = chosen(make(mode=AUTO), tmp_path, [1, 1], before)
    assert [(choice.config.mode, choice.config.pipeline.width) for choice, _ in found] == [("pipe", 3)] * 2
    assert [fake.measured for _, fake in found] == [measured] * 2
    assert found[0][0].sentences == ["keeps pipe, with which the run began", *["compared"] * measured]
    assert len({choice.cluster for choice, _ in found}) == 1
    found[0][0].write(tmp_path)
    again = chosen(make(mode=AUTO), tmp_path, [1, 1], before)
    assert [fake.measured for _, fake in again] == [0, 0], "the file has the present machines"


@pytest.mark.parametrize("given", ["sync", None])
def test_with_other_machines_it_keeps_its_mode_and_says_how_this_compares(
    make: Make, tmp_path: Path, given: str | None
) -> None:
    found = chosen(make(mode=AUTO), tmp_path, [2, 1], saved(make(mode=given), 2))
    assert [(choice.config.mode, fake.measured) for choice, fake in found] == [("sync", 1)] * 3
    assert found[0][0].sentences == ["keeps sync, with which the run began", "compared"]
    assert found[0][1].compared == [("the machines", [2, 1], "sync")]


@pytest.mark.parametrize("given", ["single", None])
def test_a_run_that_began_with_one_rank_gets_a_new_mode_when_others_join(make: Make, tmp_path: Path, given: str | None) -> None:
    found = chosen(make(mode=AUTO), tmp_path, [1, 1], saved(make(mode=given), 1))
    assert [choice.config.mode for choice, _ in found] == ["sparse-local"] * 2


@pytest.mark.parametrize(
    ("hosts", "nodes", "left"),
    [(("a", "c", "c"), (0, 1, 1), [1, 0, 2]), (("c",), (0,), [0, 0, 1]), (("b",), (0,), [0, 1, 0])],
    ids=["a machine", "all but a device", "rank 0"],
)
def test_after_a_loss_the_modes_are_compared_on_what_is_left(
    make: Make, hosts: tuple[str, ...], nodes: tuple[int, ...], left: list[int]
) -> None:
    fake = Fake(make())
    choice = ChosenMode(make(mode="sync"), fake, "the machines", ["a", "b", "c"])
    ranks: Any = SimpleNamespace(hosts=hosts, nodes=nodes)
    assert choice.review(ranks) == "compared"
    assert fake.compared == [("the machines", left, "sync")]


def test_without_measurements_nothing_is_said_after_a_loss(make: Make) -> None:
    ranks: Any = SimpleNamespace(hosts=("a",), nodes=(0,))
    assert ChosenMode(make(mode="sync"), Fake(make()), "", ["a", "b"]).review(ranks) == ""


def test_mode_single_on_several_devices_is_kept(make: Make, tmp_path: Path) -> None:
    found = chosen(make(mode=AUTO), tmp_path, [2], saved(make(mode="single"), 2))
    assert [choice.config.mode for choice, _ in found] == ["single"] * 2
