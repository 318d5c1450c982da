"""Metrics of checkpoints on a test set, one row per checkpoint, as a table for people or as data for programs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nmt_train.common.errors import NotFinite, UserError
from nmt_train.common.metric import metric_of
from nmt_train.corpus import MAX_RATIO, Files, untagged
from nmt_train.corpus.vocabulary import Vocabulary
from nmt_train.load_model import load_model, tags
from nmt_train.model.metrics import TestSet, ValidationConfig
from nmt_train.run.folder import find_checkpoints, newest


def measure(
    paths: list[Path], average: int | None, test: list[str] | None, config: ValidationConfig, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Yield one row of metrics and signatures per checkpoint; for a run, all checkpoints or the mean of the last `average`.

    test: the source and target files, or one TSV file; None means the corpus.valid of each run. Raises UserError if a file
    cannot be read or `config.command` gives no score, and NotFinite if a model's output is not finite.
    """
    sets: dict[tuple[str, str], TestSet] = {}
    for path in paths:
        for group in [[one] for one in find_checkpoints(path)] if average is None else [newest(path, average)]:
            model, vocabulary, facts = load_model(group, device)
            files: Files = list(test) if test else _files(facts)
            key = (vocabulary.digest, str(files))
            if key not in sets:
                sets[key] = test_set(test, vocabulary, facts)
            with naming(group[-1]):
                scores = sets[key].measure(model, config)
            for reason in scores.failures.values():
                raise UserError(f"--command: {group[-1]}: {reason}; it should print the score in its last line")
            update = facts["progress"]["updates"]
            yield {
                "checkpoint": str(group[-1]), "averaged": len(group), "update": update, "test": files,
                **scores.values, "signatures": scores.signatures, "beam": config.beam,
            }  # fmt: skip


def score(path: Path, average: int, test: list[str] | None, batch_tokens: int, device: torch.device) -> list[float]:
    """Return log p of each pair of a test set for one model; arguments and errors as for `measure`."""
    group = newest(path, average)
    model, vocabulary, facts = load_model(group, device)
    with naming(group[-1]):
        return test_set(test, vocabulary, facts).score(model, batch_tokens)


@contextmanager
def naming(checkpoint: Path) -> Iterator[None]:
    """Add the checkpoint to the message of a `NotFinite`."""
    try:
        yield
    except NotFinite as error:
        raise NotFinite(f"{checkpoint}: {error}") from None


def test_set(test: list[str] | None, vocabulary: Vocabulary, facts: dict[str, Any]) -> TestSet:
    """The test set of these files, or the run's first validation set. UserError if its sources lack the tags of the model."""
    if test:
        found, needed = TestSet(list(test), "--test", vocabulary, MAX_RATIO), tags(facts)
        for number in untagged(found.sources, needed):
            raise UserError(
                f"--test, line {number}: has no tag, but all sources of the training corpora have one; begin each source with"
                f" {' or '.join(needed)}"
            )
        return found
    try:
        corpus = facts["config"]["corpus"]
        first = corpus["valid"][0]
        tag = first.get("tag", "") if isinstance(first, dict) else ""
        return TestSet(_files(facts), "corpus.valid", vocabulary, corpus.get("max_ratio", MAX_RATIO), tag)
    except UserError as error:
        raise UserError(f"{error}; or name a test set with --test") from None


def _files(facts: dict[str, Any]) -> Files:
    """The files of a run's first validation set."""
    valid = facts["config"]["corpus"]["valid"]
    files: Files = valid[0]["files"] if isinstance(valid[0], dict) else valid
    return files


def table(rows: list[dict[str, Any]], metrics: list[str]) -> str:
    """Format the rows as aligned columns, followed by each distinct signature."""
    head = ["checkpoint", "update", *metrics]
    body = [
        [
            row["checkpoint"] + (f" (mean of {row['averaged']})" if row["averaged"] > 1 else ""),
            f"{row['update']:,}",
            *(f"{row[metric]:.{metric_of(metric).decimals}f}" for metric in metrics),
        ]
        for row in rows
    ]
    lines = aligned([head, *body])
    signatures = {f"{name}: {text}" for row in rows for name, text in row["signatures"].items()}
    return "\n".join([*lines, "", *sorted(signatures), f"beam {rows[0]['beam']}, cross-entropy per target piece, END included"])


def aligned(lines: list[list[str]]) -> list[str]:
    """Lines of cells in columns; the first column is aligned to the left, the others to the right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
