"""The progress of training: counters, and clocks in seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from nmt_train.common.duration import Mark
from nmt_train.corpus.batch import Batch

_SUMS = ("sentences", "tokens", "source_tokens", "skipped", "cost", "cost_tokens")


@dataclass
class Progress:
    """Counters of all workers since the first start, including restarts. Tokens are target tokens, including END.

    epochs: completed epochs. batches: batches done in the current epoch. sentences: sentences trained so far in the epoch of
    the last batch. skipped: batches skipped because of non-finite values. seconds: wall-clock time. training_seconds: the same
    without validations during which no rank trains. cost, cost_tokens: summed cost and its tokens since the last log line.
    logged_seconds: the training_seconds at the last log line.
    """

    epochs: int = 0
    batches: int = 0
    updates: int = 0
    sentences: int = 0
    tokens: int = 0
    source_tokens: int = 0
    skipped: int = 0
    seconds: float = 0.0
    training_seconds: float = 0.0
    cost: float = 0.0
    cost_tokens: int = 0
    logged_seconds: float = 0.0
    _epoch_is_over: bool = field(default=True, repr=False)
    _waiting: list[tuple[Tensor, int]] = field(default_factory=list, repr=False)
    _now: Callable[[], float] = field(default=time.perf_counter, repr=False)
    _last: float = field(default=0.0, repr=False)

    def advance(self, loss: Tensor, batch: Batch) -> None:
        """Count one batch. loss: its mean cost per token, which is read only when logged, to avoid waiting for the GPU."""
        self._begin_epoch()
        self.sentences += len(batch)
        self.tokens += batch.target_tokens
        self.source_tokens += batch.source_tokens
        self._waiting.append((loss.detach(), batch.target_tokens))

    def skip(self) -> None:
        """Count a skipped batch."""
        self._begin_epoch()
        self.skipped += 1

    def at(self, epochs: int, batches: int) -> None:
        """Set the number of completed epochs, and the number of batches done in the current epoch."""
        self._epoch_is_over |= epochs > self.epochs  # other workers begin with no batches of an epoch that is not over
        self.epochs, self.batches = epochs, batches

    def _begin_epoch(self) -> None:
        if self._epoch_is_over:
            self.sentences, self._epoch_is_over = 0, False
        self.tick(training=True)

    def take(self) -> dict[str, Any]:
        """Return what was counted since the last call, for `merge`, and reset the counters."""
        self.mean_cost()
        taken = {name: getattr(self, name) for name in _SUMS}
        for name in _SUMS:
            setattr(self, name, type(taken[name])())
        return taken

    def merge(self, taken: dict[str, Any]) -> None:
        """Add what another worker counted."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + taken[name])

    def tick(self, training: bool) -> None:
        """Add the time since the last tick to `seconds` and, if `training`, to `training_seconds`."""
        now = self._now()
        self.seconds += now - self._last
        if training:
            self.training_seconds += now - self._last
        self._last = now

    def start_clock(self, now: Callable[[], float], since: float | None = None) -> None:
        """Measure time with the clock `now`, starting at its current time, or at its time `since` [seconds]."""
        self._now, self._last = now, now() if since is None else since

    @property
    def clock(self) -> float:
        """The time of the last tick, in seconds of the clock."""
        return self._last

    def mean_cost(self) -> float:
        """Cost per target token since the last `logged`."""
        for loss, tokens in self._waiting:
            value = float(loss)
            # A cost that is not finite, of a batch that is skipped later, counts as the mean so far.
            self.cost += tokens * (value if math.isfinite(value) else self.cost / max(1, self.cost_tokens))
            self.cost_tokens += tokens
        self._waiting.clear()
        return self.cost / max(1, self.cost_tokens)

    def words(self) -> int:
        """Tokens since the last `logged`."""
        self.mean_cost()
        return self.cost_tokens

    def logged(self) -> None:
        """Reset the sums after a log line."""
        self.cost, self.cost_tokens, self.logged_seconds = 0.0, 0, self.training_seconds

    @property
    def epoch(self) -> int:
        """The epoch of the last batch, counted from 1."""
        return max(1, self.epochs + (self.batches > 0 or not self._epoch_is_over))

    def epochs_trained(self, pairs: int) -> float:
        """Epochs so far, with the fraction of the current one; pairs: sentence pairs in an epoch, or 0 if unknown."""
        return self.epochs + (self.sentences / pairs if pairs and self.batches else 0.0)

    def mark(self) -> Mark:
        """The current progress, for comparison with a later one."""
        return Mark(self.epochs, self.updates, self.tokens, self.seconds)

    def __post_init__(self) -> None:
        self._epoch_is_over, self._last = not self.batches, self._now()

    def state(self) -> dict[str, Any]:
        """The counters as JSON; `Progress(**state)` continues from them."""
        self.mean_cost()
        return {kept.name: getattr(self, kept.name) for kept in fields(self) if not kept.name.startswith("_")}
