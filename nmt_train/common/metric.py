"""The validation metrics by name, and what logs, figures and stop conditions need to know about each of them."""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """label: title of a figure's axis. translated: the metric needs translations (beam search). decimals: digits in tables."""

    label: str
    lower_is_better: bool
    translated: bool
    decimals: int


METRICS = {
    "cross-entropy": Metric("validation cross-entropy per piece (nats)", lower_is_better=True, translated=False, decimals=4),
    "perplexity": Metric("validation perplexity", lower_is_better=True, translated=False, decimals=2),
    "bleu": Metric("validation BLEU", lower_is_better=False, translated=True, decimals=2),
    "chrf": Metric("validation chrF", lower_is_better=False, translated=True, decimals=2),
}
