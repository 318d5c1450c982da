"""Exact match (accuracy): the share of translations that equal their reference, as a metric of sacreBLEU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sacrebleu.metrics.base import Metric, Score


class ExactMatch(Metric):
    """The share of translations that equal the reference, apart from spaces, in percent.

    It is a metric of sacreBLEU so that it has a signature and that significance can be tested as of the others.
    """

    def __init__(self, references: Sequence[Sequence[str]] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if references is not None:
            self._ref_cache = self._cache_references(references)

    def _preprocess_segment(self, sent: str) -> str:
        return " ".join(sent.split())

    def _extract_reference_info(self, refs: Sequence[str]) -> dict[str, Any]:
        return {"references": refs}

    def _compute_segment_statistics(self, hypothesis: str, ref_kwargs: dict[str, Any]) -> list[int]:
        return [int(hypothesis in ref_kwargs["references"]), 1]

    def _aggregate_and_compute(self, stats: list[list[int]]) -> Score:
        return self._compute_score_from_stats([sum(column) for column in zip(*stats, strict=True)])

    def _compute_score_from_stats(self, stats: list[int]) -> Score:
        equal, translations = stats
        return Score("exact match", 100 * equal / translations)
