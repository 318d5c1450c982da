"""A background task that exchanges vectors while its worker computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor

from nmt_train.distributed.transport import Tasks
from nmt_train.trace import Trace

T = TypeVar("T")


class BackgroundTask(Generic[T]):
    """Exchanges vectors one after the other, in the order of `give`; all workers must give them in the same order.

    under_way: the number of vectors that have been given but not taken back. ready: whether `take` would not wait.
    """

    def __init__(self, tasks: Tasks, trace: Trace, exchange: Callable[[Tensor, int], T]) -> None:
        """exchange: exchanges one vector, which it may change; the task calls it with the vector and its weight."""
        self._trace, self._exchange = trace, exchange
        self._given, self._done = deque[tuple[Tensor, int]](), deque[tuple[Tensor, T]]()
        self.under_way = 0
        self._work, self._news = tasks.event(), tasks.event()
        self._task = tasks.spawn("background task", self._run)

    def give(self, vector: Tensor, weight: int) -> None:
        self.under_way += 1
        self._given.append((vector, weight))
        self._work.set()

    @property
    def ready(self) -> bool:
        return bool(self._done) or self._task.done()

    def take(self) -> tuple[Tensor, T]:
        """Wait for the oldest vector in flight; returns it and the result of `exchange`. Raises the error of a failed one."""
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
            self._done.append((vector, self._exchange(vector, weight)))
            self._news.set()
