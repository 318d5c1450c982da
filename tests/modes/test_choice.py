"""Which mode trains if the configuration names none."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from conftest import Make
from simulated import parameters, run

from nmt_train.modes import resolve as modes


@pytest.mark.parametrize(("given", "ranks", "chosen"), [(None, 1, "single"), (None, 4, "sync"), ("single", 4, "single")])
def test_one_rank_trains_alone_and_several_in_step_unless_a_mode_is_given(
    make: Make, given: str | None, ranks: int, chosen: str
) -> None:
    assert modes.choose_mode(make(mode=given), ranks).mode == chosen


def test_the_choice_is_said_and_written_down(make: Make, tmp_path: Path) -> None:
    chosen = run(make, tmp_path / "chosen", [2])
    assert "mode: none is given, so 2 ranks train in mode sync;" in (chosen / "train.log").read_text(encoding="utf-8")
    assert yaml.safe_load((chosen / "config.yml").read_text(encoding="utf-8"))["mode"] is None, "other devices choose again"
    assert parameters(chosen) == parameters(run(make, tmp_path / "named", [2], mode="sync"))


def test_settings_of_the_mode_that_will_be_chosen_are_not_refused_before(make: Make, tmp_path: Path) -> None:
    simulated = run(make, tmp_path / "run", [2], replicas__codec="half", replicas__buckets=2)
    assert "mode sync on cpu" in (simulated / "train.log").read_text(encoding="utf-8")
