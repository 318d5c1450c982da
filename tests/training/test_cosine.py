"""A cosine over tokens or epochs: the same learning rate after the same words, in every mode and with any number of ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from conftest import Make
from simulated import events, parameters, run

from nmt_train.common.errors import UserError

pytestmark = pytest.mark.slow

FALLING = {
    "optimizer__schedule": "cosine", "optimizer__warmup": 0, "optimizer__async_warmup": 0, "optimizer__learning_rate": 0.001,
    "batch__tokens": 400, "validation__every": "2000t",
}  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "nodes"),
    [
        ("single", [1]), ("sparse-overlap", [2, 1]), ("sync", [1, 1]), ("local-sgd", [1, 1]), ("strom", [1, 1]),
    ],
)  # fmt: skip
def test_the_rate_depends_on_the_words_only(make: Make, tmp_path: Path, mode: str, nodes: list[int]) -> None:
    folder = run(make, tmp_path / "run", nodes, mode=mode, stop__after="2e", **FALLING)
    found = events(folder, "validation")
    total = found[-1]["words"]
    assert len(found) > 5
    for event in found[:-1]:
        expected = 0.001 * (1 + math.cos(math.pi * event["words"] / total)) / 2
        assert event["learning_rate"] == pytest.approx(expected, abs=0.1 * 0.001)
    assert found[-1]["learning_rate"] < 0.05 * 0.001


@pytest.mark.parametrize("mode", ["sync", "local-sgd", "sparse-local", "vanilla"])
def test_a_cosine_over_updates_lasts_as_long_as_a_run_of_so_many(make: Make, tmp_path: Path, mode: str) -> None:
    folder = run(make, tmp_path / "run", [1, 1], mode=mode, stop__after="12u", **{**FALLING, "validation__every": "1u"})
    rates = [event["learning_rate"] for event in events(folder, "validation")]
    assert rates[-1] < 0.1 * 0.001
    middle = [event["learning_rate"] for event in events(folder, "validation") if event["update"] == 6]
    assert middle[0] == pytest.approx(0.0005, abs=0.00027)


def test_another_length_that_changes_the_curve_is_refused(make: Make, tmp_path: Path) -> None:
    for _ in range(2):
        folder = run(make, tmp_path / "run", [1], mode="single", stop__after="4u", **FALLING)
    with pytest.raises(UserError, match="another configuration: optimizer.cosine_until was 4u, now 8u; restore it"):
        run(make, tmp_path / "run", [1], mode="single", stop__after="8u", **FALLING)
    run(make, tmp_path / "run", [1], mode="single", stop__after="8u", optimizer__cosine_until="4u", **FALLING)
    assert events(folder, "validation")[-1]["learning_rate"] < 1e-6


@pytest.mark.parametrize("changes", [{"mode": "sync"}, {"mode": "vanilla", "server__bypass": "none"}, {"mode": "local-sgd"}])
def test_a_resumed_run_continues_on_the_same_curve(make: Make, tmp_path: Path, changes: dict[str, Any]) -> None:
    curve: dict[str, Any] = {**FALLING, "optimizer__cosine_until": "2e", **changes}
    whole = run(make, tmp_path / "whole", [1, 1], stop__after="2e", **curve)
    for after in ("1e", "2e"):
        parts = run(make, tmp_path / "parts", [1, 1], stop__after=after, **curve)
    ends = [events(folder, "validation")[-1] for folder in (whole, parts)]
    assert ends[0]["learning_rate"] == pytest.approx(ends[1]["learning_rate"], rel=0.5, abs=1e-6)
    if changes["mode"] == "sync":
        assert parameters(parts) == parameters(whole)
