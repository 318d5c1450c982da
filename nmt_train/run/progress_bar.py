"""A progress bar on the terminal: the fraction of training that is done, the time left, and the current cost."""

from __future__ import annotations

import time
from typing import Any, TextIO

from tqdm import tqdm

from nmt_train.run.progress import Progress

_REFRESH = 1.0  # seconds between refreshes: reading the cost waits for the GPU, so it is not read after every update
_FORM = "{percentage:3.0f}% |{bar}| {elapsed} elapsed, {remaining} left{postfix}"


class ProgressBar:
    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self._bar: Any = None
        self._shown = 0.0

    def advance(self, progress: Progress, share: float) -> None:
        """share: the fraction of training that is done, from 0 to 1, including what was done before this start."""
        if self._bar is None:
            self._bar = tqdm(file=self._terminal, total=1.0, initial=share, leave=False, dynamic_ncols=True, bar_format=_FORM)
        if self._due():
            said = f"epoch {progress.epoch}, update {progress.updates:,}, cost {progress.mean_cost():.3f}"
            self._bar.set_postfix_str(said, refresh=False)
            self._bar.update(share - self._bar.n)

    def validating(self) -> None:
        """To be called often while this rank validates: an untrained model may take minutes, as its sentences do not end."""
        if self._bar is not None and self._due():
            self._bar.set_postfix_str("validating")

    def _due(self) -> bool:
        now = time.monotonic()
        due = now - self._shown >= _REFRESH
        self._shown = now if due else self._shown
        return due

    def clear(self) -> None:
        """Make room for a line; the bar comes back later, because mpirun may forward the line with some delay."""
        if self._bar is not None:
            self._bar.clear()
            self._shown = time.monotonic()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
