"""Shows how far a pass over a large corpus is: a bar on a terminal, otherwise a line from time to time."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from tqdm import tqdm

from nmt_train.common.streams import tell

_DELAY = 2.0  # seconds before the bar appears
_PAUSE = 60.0  # seconds between two lines
_FORM = "nmt-train: {desc} {percentage:3.0f}% |{bar}| {elapsed} elapsed, {remaining} left, {rate_fmt}"
_OPEN = "nmt-train: {desc}, {n_fmt} pairs, {elapsed} elapsed, {rate_fmt}"  # if the number of all pairs is not known


class PassBar:
    def __init__(self, what: str, total: int | None = None) -> None:
        """what: is going on. total: the number of pairs, if it is known."""
        self._what, self._total, self._done, self._begun = what, total, 0, time.monotonic()
        self._said = self._begun
        terminal = sys.stderr is not None and sys.stderr.isatty()
        self._bar: Any = None
        if terminal:
            self._bar = tqdm(
                desc=what, total=total, unit=" pairs", leave=False, delay=_DELAY, dynamic_ncols=True,
                bar_format=_FORM if total else _OPEN, file=sys.stderr,
            )  # fmt: skip

    def __enter__(self) -> PassBar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, pairs: int) -> None:
        """Some more pairs are done."""
        self._done += pairs
        if self._bar is not None:
            self._bar.update(pairs)
        elif (now := time.monotonic()) - self._said >= _PAUSE:
            self._said = now
            tell(f"nmt-train: {self._what}: {self._described(now - self._begun)}")

    def _described(self, seconds: float) -> str:
        if not self._total:
            return f"{self._done:,} pairs"
        minutes, left = divmod(round(seconds / self._done * (self._total - self._done)), 60)
        return f"{self._done / self._total:.0%}, {minutes}:{left:02} left"
