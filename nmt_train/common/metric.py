"""The validation metrics by name, and what logs, figures and stop conditions need to know about each of them."""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """label: title of a figure's axis. translated: the metric needs translations (beam search). decimals: digits in tables.

    worst: the score of translations that have nothing right; None if there is no such score.
    """

    label: str
    lower_is_better: bool
    translated: bool
    decimals: int
    worst: float | None = None


# Metrics that nmt_train itself measures. There are also `command` (validation.command), and names such as `bleu@news` for other
# validation sets.
METRICS = {
    "cross-entropy": Metric("validation cross-entropy per word (nats)", lower_is_better=True, translated=False, decimals=4),
    "perplexity": Metric("validation perplexity", lower_is_better=True, translated=False, decimals=2),
    "bleu": Metric("validation BLEU", lower_is_better=False, translated=True, decimals=2, worst=0.0),
    "chrf": Metric("validation chrF", lower_is_better=False, translated=True, decimals=2, worst=0.0),
    "chrf++": Metric("validation chrF++", lower_is_better=False, translated=True, decimals=2, worst=0.0),
    "ter": Metric("validation TER (%)", lower_is_better=True, translated=True, decimals=2),
    "exact-match": Metric("validation exact match (%)", lower_is_better=False, translated=True, decimals=2, worst=0.0),
}
COMMAND = "command"
_OF_COMMAND = Metric("score of validation.command", lower_is_better=False, translated=True, decimals=4)


def named(metric: str, validation_set: str) -> str:
    """The name of a metric on a validation set, whose name is empty for the first one."""
    return f"{metric}@{validation_set}" if validation_set else metric


def metric_of(name: str) -> Metric:
    """What is known of a metric by its name on any validation set."""
    metric, _, validation_set = name.partition("@")
    found = METRICS.get(metric, _OF_COMMAND)
    return found._replace(label=f"{found.label}, {validation_set}") if validation_set else found


def is_worst(name: str, score: float) -> bool:
    """Whether the score is the metric's worst possible one, which is never kept as the best one."""
    return score == metric_of(name).worst
