"""A background task that exchanges vectors while its worker computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import Tensor

from nmt_train.common.errors import NotFinite
from nmt_train.distributed.transport import Tasks
from nmt_train.trace import Trace

T = TypeVar("T")


class BackgroundTask(Generic[T]):
    """Exchanges vectors one after the other, in the order of `give`; all workers must give them in the same order.

    under_way: the number of vectors that have been given but not taken back. ready: whether `take` would not wait.
    """

    def __init__(self, tasks: Tasks, trace: Trace, exchange: Callable[..., T]) -> None:
        """exchange: exchanges one vector, which it may change; the task calls it with the arguments of `give`."""
        self._trace, self._exchange = trace, exchange
        self._given, self._done = deque[tuple[Any, ...]](), deque[tuple[Tensor, T | NotFinite]]()
        self.under_way = 0
        self._work, self._news = tasks.event(), tasks.event()
        self._task = tasks.spawn("background task", self._run)

    def give(self, vector: Tensor, *details: int) -> None:
        self.under_way += 1
        self._given.append((vector, *details))
        self._work.set()

    @property
    def ready(self) -> bool:
        return bool(self._done) or self._task.done()

    def take(self) -> tuple[Tensor, T]:
        """Wait for the oldest vector in flight; returns it and the result of `exchange`. Raises the error of a failed one.

        After NotFinite, the task continues with the next vector; other errors end it.
        """
        with self._trace.span("waiting"):
            while not self._done:
                self._news.clear()
                if self._task.done():
                    self._task.result()
                if not self._done:
                    self._news.wait()
        self.under_way -= 1
        vector, result = self._done.popleft()
        if isinstance(result, NotFinite):
            raise result
        return vector, result

    def _run(self) -> None:
        while True:
            while not self._given:
                self._work.clear()
                if not self._given:
                    self._work.wait()
            vector, *details = self._given.popleft()
            try:
                self._done.append((vector, self._exchange(vector, *details)))
            except NotFinite as error:
                self._done.append((vector, error))
            self._news.set()
