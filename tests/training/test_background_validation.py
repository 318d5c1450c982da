"""What the time of a validation counts as: training, if other workers train meanwhile."""

from __future__ import annotations

import io
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nmt_train.run.log import Log
from nmt_train.run.progress import Progress
from nmt_train.training.background_validation import BackgroundValidation


class Clock:
    now = 0.0


class TestSets:
    """Measures for five seconds, and looks once whether it should stop."""

    __test__ = False

    def measure(self, model: Any, config: Any, asked_to_stop: Any) -> dict[str, Any]:
        Clock.now += 2.0
        asked_to_stop()
        Clock.now += 3.0
        return {}


@pytest.mark.parametrize(("ranks", "synchronous", "counted"), [(1, False, 0.0), (2, True, 0.0), (2, False, 5.0)])
def test_validation_counts_as_training_only_if_others_train_meanwhile(ranks: int, synchronous: bool, counted: float) -> None:
    Clock.now = 0.0
    progress = Progress()
    progress.start_clock(lambda: Clock.now)
    worker: Any = SimpleNamespace(
        transport=SimpleNamespace(size=ranks), plan=SimpleNamespace(synchronous=synchronous),
        trace=SimpleNamespace(span=lambda name: nullcontext()), flat=SimpleNamespace(using=lambda vector: nullcontext()),
        model=None, config=SimpleNamespace(validation=None),
    )  # fmt: skip
    state: Any = SimpleNamespace(progress=progress)
    run: Any = None
    log = Log(io.StringIO(), io.StringIO())
    validation = BackgroundValidation(worker, run, log, state, TestSets(), lambda: False)  # type: ignore[arg-type]
    assert validation._measure(torch.zeros(1)) == {}
    assert (progress.seconds, progress.training_seconds) == (5.0, counted)
