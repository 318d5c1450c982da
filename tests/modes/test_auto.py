"""`mode: auto`: what a choice replaces in a configuration, and what it leaves."""

from __future__ import annotations

import pytest
from conftest import Make

from nmt_train.common.errors import UserError
from nmt_train.common.yaml_file import flatten
from nmt_train.config import plain, with_values
from nmt_train.modes import resolve as modes
from nmt_train.modes.auto import AUTO, part_of_mode, replaced, with_mode

SETTINGS = {"local.every": "2", "tiles.keep": "86", "batch.accumulate": "1"}


def test_a_choice_replaces_all_settings_of_modes_and_nothing_else(make: Make) -> None:
    given = make(mode=AUTO, overlap__bound=7, batch__accumulate=3, optimizer__learning_rate=0.5, server__per="node")
    chosen = with_mode(given, "sparse-local", SETTINGS)
    assert chosen == make(mode="sparse-local", local__every=2, tiles__keep=86, optimizer__learning_rate=0.5)
    assert replaced(given) == ["batch.accumulate", "overlap.bound", "server.per"]
    assert replaced(make(mode=AUTO)) == []


def test_the_part_of_a_mode_travels_between_configurations(make: Make) -> None:
    waves = with_mode(make(), "vanilla", {"server.join": "{1: 0u, 2: 10u}"})
    assert with_values(make(mode=AUTO), part_of_mode(flatten(plain(waves)))) == waves
    chosen = with_mode(make(mode=AUTO, seed=1), "sparse-local", SETTINGS)
    there = make(mode=AUTO, seed=2, overlap__bound=7)
    assert with_values(there, part_of_mode(flatten(plain(chosen)))) == with_mode(there, "sparse-local", SETTINGS)


def test_a_part_that_an_earlier_version_saved_may_lack_keys_and_have_others(make: Make) -> None:
    saved = part_of_mode({"mode": "sync", "batch.accumulate": 2, "local.every": 5, "tiles.removed_since": 1})
    assert with_values(make(mode=AUTO, tiles__keep=3), saved) == make(mode="sync", batch__accumulate=2, local__every=5)


def test_only_training_decides_what_auto_means(make: Make) -> None:
    with pytest.raises(UserError, match="mode: auto: only nmt-train chooses a mode.*--compare"):
        modes.resolve(make(mode=AUTO))
