"""A background task that exchanges vectors while its worker computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torch import Tensor

from nmt_train.distributed.exchange.ring import Reduction
from nmt_train.distributed.transport import Tasks
from nmt_train.trace import Trace


class BackgroundTask:
    """Exchanges vectors one after the other, in the order of `give`; all workers must give them in the same order.

    under_way: the number of vectors that have been given but not taken back.
    """

    def __init__(self, tasks: Tasks, trace: Trace, exchange: Callable[[Tensor, int], Reduction]) -> None:
        """exchange: exchanges one vector, which it may change; the task calls it with the vector and its weight."""
        self._trace, self._exchange = trace, exchange
        self._given, self._done = deque[tuple[Tensor, int]](), deque[tuple[Tensor, Reduction]]()
        self.under_way = 0
        self._work, self._news = tasks.event(), tasks.event()
        self._task = tasks.spawn("background task", self._run)

    def give(self, vector: Tensor, weight: int) -> None:
        self.under_way += 1
        self._given.append((vector, weight))
        self._work.set()

    def take(self) -> tuple[Tensor, Reduction]:
        """Wait for the oldest vector in flight; returns it and its `Reduction`. Raises the error of a failed exchange."""
        with self._trace.span("waiting"):
            while not self._done:
                self._news.clear()
                if self._task.done():
                    self._task.result()
                if not self._done:
                    self._news.wait()
        self.under_way -= 1
        return self._done.popleft()

    def _run(self) -> None:
        while True:
            while not self._given:
                self._work.clear()
                if not self._given:
                    self._work.wait()
            vector, weight = self._given.popleft()
            with self._trace.span("sync"):
                joined = self._exchange(vector, weight)
            self._done.append((vector, joined))
            self._news.set()
