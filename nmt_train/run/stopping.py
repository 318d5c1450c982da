"""When training ends: after a stated length, or when validation has stopped improving."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from nmt_train.common.duration import Duration
from nmt_train.common.metric import metric_of
from nmt_train.common.plural import counted
from nmt_train.common.section import STRICT, as_list
from nmt_train.run.progress import Progress


@dataclass(frozen=True, config=STRICT)
class StopConfig:
    """The conditions that end training; the first one that is met counts."""

    after: Annotated[list[Duration], BeforeValidator(as_list)] = Field(
        min_length=1,
        description="length of training, as 40u, 10e, 300Kt or 2h (wall-clock time of all starts); of a list, whichever"
        " comes first",
    )
    patience: int = Field(
        default=0, ge=0, le=10**9, description="stop after this many validations in a row without a new best; 0: never"
    )
    patience_on: Annotated[list[str], BeforeValidator(as_list)] = Field(
        default=["all"],
        min_length=1,
        description="which metrics must have run out of patience: all measured ones (all), at least one (any), or all of the"
        " named ones, as in [bleu, chrf@news]",
    )

    @property
    def countable(self) -> Duration | None:
        """The first condition of `after` that is not a time."""
        return next((span for span in self.after if span.counts), None)

    def reason(self, progress: Progress) -> str | None:
        """Why training is over, for the log, or None if it is not."""
        return next((f"stop.after {span} reached" for span in self.after if span.reached(progress)), None)

    def share(self, progress: Progress, pairs: int) -> float:
        """The part of the training that is done, from 0 to 1, by the condition of `after` that is closest to its end.

        pairs: the number of sentence pairs in an epoch, or 0 if unknown.
        """
        return min(1.0, max(_done(span, progress, pairs) / span.amount for span in self.after))

    def unfinished(self, progress: Progress, pairs: int) -> str:
        """How far training has come, as `1.2 of 8 epochs`, by the condition of `after` that is closest to its end.

        Conditions that are times do not count; empty if there are no others, or if one of them is met. pairs: as for `share`.
        """
        spans = [span for span in self.after if span.counts]
        if not spans or any(span.reached(progress) for span in spans):
            return ""
        nearest = max(spans, key=lambda span: _done(span, progress, pairs) / span.amount)
        noun = {"e": "epoch", "u": "update", "t": "word"}[nearest.unit]
        return f"{shortened(_done(nearest, progress, pairs)):,.15g} of {counted(nearest.amount, noun)}"


def _done(span: Duration, progress: Progress, pairs: int) -> float:
    return progress.epochs_trained(pairs) if span.unit == "e" else span.measure(progress)


def shortened(number: float) -> float:
    """The number with one decimal, or two if it is below 1, rounded down: 7.99 of 8 epochs are not all of them."""
    digits = 10 if number >= 1 else 100
    return math.floor(number * digits + 1e-9) / digits


@dataclass
class Verdict:
    """The state of one metric after a validation: its best value, and the number of validations since that best.

    stage: the stage of the training corpora (`until`); `stalled` begins at zero in each. test: identifies the text and the
    settings that the metric was measured with; empty if not known.
    """

    best: float
    stalled: int
    stage: int = 0
    test: str = ""


class Patience:
    """Keeps the best value of each metric; its state is part of every checkpoint.

    forgotten: the metrics whose saved values `load` has left out, because they are measured otherwise now.
    """

    def __init__(self, config: StopConfig, last_stage: int = 0, tests: Mapping[str, str] = MappingProxyType({})) -> None:
        """last_stage: training does not stop early before it. tests: for each metric, the `test` of its verdicts."""
        self._config, self._last_stage, self._tests = config, last_stage, tests
        self.verdicts: dict[str, Verdict] = {}
        self.forgotten: list[str] = []

    def record(self, scores: dict[str, float], failed: Sequence[str] = (), stage: int = 0) -> dict[str, Verdict]:
        """Judge one validation; a verdict with `stalled` 0 is a new best. Metrics no longer measured are forgotten.

        failed: metrics that could not be measured this time, whose verdicts stay as they are. stage: see `Verdict`.
        """
        before, self.verdicts = self.verdicts, {}
        for metric, value in scores.items():
            last, test = before.get(metric), self._tests.get(metric, "")
            if last is None or (value < last.best if metric_of(metric).lower_is_better else value > last.best):
                self.verdicts[metric] = Verdict(value, 0, stage, test)
            else:
                self.verdicts[metric] = Verdict(last.best, last.stalled + 1 if last.stage == stage else 1, stage, test)
        judged = dict(self.verdicts)
        self.verdicts |= {metric: before[metric] for metric in failed if metric in before}
        return judged

    @property
    def reason(self) -> str | None:
        """Why training should stop early, for the log, or None if it should not."""
        if not self._config.patience or not self.verdicts:
            return None
        on = self._config.patience_on
        names = list(self.verdicts) if on in (["any"], ["all"]) else [name for name in on if name in self.verdicts]
        found = [self.verdicts[name] for name in names]
        out = [its.stalled >= self._config.patience and its.stage >= self._last_stage for its in found]
        over = bool(out) and (any(out) if on == ["any"] else all(out))
        return f"no new best in {counted(self._config.patience, 'validation')} (stop.patience)" if over else None

    def state(self) -> dict[str, Any]:
        return {metric: list(vars(verdict).values()) for metric, verdict in self.verdicts.items()}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned, but for metrics that are measured on another text or with other settings now."""
        self.verdicts = {metric: Verdict(*values) for metric, values in state.items()}
        tests = {metric: verdict.test for metric, verdict in self.verdicts.items() if verdict.test}
        self.forgotten = [metric for metric, test in tests.items() if test != self._tests.get(metric, test)]
        for metric in self.forgotten:
            del self.verdicts[metric]
