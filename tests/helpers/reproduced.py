"""Run folders as simulations leave them behind, for the pages of the reproduction."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from reproduce.runs import Runs, Setup

Found = TypeVar("Found", bound=Runs)


def timed(
    folder: Path, setup: Setup, speed: float, workers: int = 4, sent: float = 0.0,
    spans: Mapping[str, Mapping[str, float]] | None = None,
) -> None:  # fmt: skip
    """A timing of 10 s with this speed of each worker [words/s] and traffic [bytes/word]; spans: by thread and name [s]."""
    path = folder / "timing" / setup.name / "timing.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    rank = {"sent": sent * 10 * speed, "words_per_second": speed, "seconds": 10, "spent": spans or {}}
    path.write_text(json.dumps({"words_per_second": speed * workers, "elements": 1000, "ranks": [rank] * workers}))


def learned(
    folder: Path, setup: Setup, words: float, end: float, speed: float = 1000.0, validations: int = 20, **reported: Any
) -> None:
    """Cross-entropy that falls linearly from 6 to `end` over the words, at this speed [words/s], in equal steps."""
    path = folder / "training" / setup.name / "metrics.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    events: list[dict[str, Any]] = [
        {"event": "validation", "words": round(words * n / validations), "seconds": words * n / validations / speed,
         "cross-entropy": 6 + (end - 6) * n / validations}
        for n in range(1, validations + 1)
    ]  # fmt: skip
    messages = reported.get("messages", 100)
    rank = {
        "sent": {"peer": [messages, messages * reported.get("size", 50)], "pulled": [1, 10**9], "report": [9, 9]},
        "staleness": {str(reported.get("stale", 0)): 10},
    }
    events.append({"event": "ranks", "words": words, "ranks": [rank, rank]})
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    path.with_name("finished").touch()


def collected(kind: type[Found], folder: Path) -> Found:
    """What is known of the runs in `folder`, read back from the files that keep it."""
    kind(folder / "found").collect(folder)
    return kind(folder / "found")
