"""Tests whether systems differ significantly: paired bootstrap resampling (Koehn 2004), as implemented in sacreBLEU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nmt_train.common.errors import UserError
from nmt_train.common.metric import METRICS
from nmt_train.load_model import load_model
from nmt_train.model.bleu import choose_tokenizer, scorer
from nmt_train.model.metrics import ValidationConfig
from nmt_train.report.table import aligned, naming, test_set
from nmt_train.run.folder import newest

_SAMPLES = 1000


def compare(
    paths: list[Path], average: int, test: list[str] | None, config: ValidationConfig, device: torch.device
) -> list[dict[str, Any]]:
    """Compare each model with the first one on one test set; return a row of scores per model and metric.

    Only metrics that need translations are compared. `p` is the p-value: the probability of a difference at least this large if
    the model and the first one were equally good. Arguments and errors as for `table.measure`.
    """
    metrics = [metric for metric in config.metrics if METRICS[metric].translated]
    if len(paths) < 2 or not metrics:
        raise UserError("--compare: give at least two models, and metrics of translations, such as bleu")
    systems: list[tuple[str, Sequence[str]]] = []
    references: list[str] = []
    for path in paths:
        group = newest(path, average)
        model, vocabulary, facts = load_model(group, device)
        own = test_set(test, vocabulary, facts)
        if references and own.references != references:
            raise UserError(f"--compare: {path} and {paths[0]} have different validation sets; give a test set with --test")
        references = own.references
        with naming(group[-1]):
            systems.append((str(path), own.translate(model, config)))
    return _tested(systems, references, metrics, choose_tokenizer(config.bleu_tokenizer, references))


def _tested(
    systems: list[tuple[str, Sequence[str]]], references: list[str], metrics: list[str], tokenizer: str
) -> list[dict[str, Any]]:
    from sacrebleu.significance import PairedTest  # slow to import, and most commands do not need it

    rows = []
    for metric in metrics:
        test = PairedTest(systems, {metric: scorer(metric, tokenizer, references)}, None, test_type="bs", n_samples=_SAMPLES)
        signatures, found = test()
        names = found.pop("System")
        results: list[Any] = next(iter(found.values()))
        for name, result in zip(names, results, strict=True):
            # If the scores are equal, p is 1, but sacreBLEU 2.6 returns 1/1001: it counts only strictly larger differences.
            p = None if result is results[0] else 1.0 if result.score == results[0].score else float(result.p_value)
            numbers = {key: float(getattr(result, key)) for key in ("score", "mean", "ci")}
            model, signature = str(name).removeprefix("Baseline: "), str(next(iter(signatures.values())))
            rows.append({"model": model, "metric": metric, **numbers, "p": p, "signature": signature})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Format the rows of `compare`; the interval contains 95% of the resampled scores."""
    body = [
        [
            row["model"], row["metric"], f"{row['score']:.2f}", f"{row['mean']:.2f} +/- {row['ci']:.2f}",
            "" if row["p"] is None else f"{row['p']:.4f}",
        ]
        for row in rows
    ]  # fmt: skip
    lines = aligned([["model", "metric", "score", "95% interval", "p against the first"], *body])
    return "\n".join([*lines, *dict.fromkeys(f"{row['metric']}: {row['signature']}" for row in rows)])
