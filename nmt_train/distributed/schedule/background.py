"""A background task that exchanges vectors while its worker computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from nmt_train.common.errors import NotFinite
from nmt_train.distributed.transport import Tasks
from nmt_train.trace import Trace

T = TypeVar("T")


def in_one_stage(exchange: Callable[..., T]) -> Callable[..., Generator[None, None, T]]:
    """An exchange that is over before the next one begins."""

    def stages(*arguments: Any) -> Generator[None, None, T]:
        yield from ()
        return exchange(*arguments)

    return stages


@dataclass(eq=False)
class _Begun(Generic[T]):
    """An exchange that has begun. passed: the number of its stages that are over."""

    vector: Tensor
    stages: Generator[None, None, T]
    passed: int = 0


class BackgroundTask(Generic[T]):
    """Exchanges vectors in the order of `give`; all workers must give them in the same order.

    An exchange may have stages: it yields before it waits for other ranks. The task then continues with the vector that has
    passed the fewest stages, so what has been given is sent before anything is waited for. While it waits, nothing begins. All
    vectors must have the same number of stages, and only the last stage may raise NotFinite. If more than two stages waited,
    ranks could wait for each other forever: one in a late stage of an old vector, another in an early stage of a new one.

    under_way: the number of vectors that have been given but not taken back. ready: whether `take` would not wait.
    """

    def __init__(self, tasks: Tasks, trace: Trace, exchange: Callable[..., Generator[None, None, T]]) -> None:
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
        begun = deque[_Begun[T]]()  # the oldest first
        while True:
            while not (self._given or begun):
                self._work.clear()
                if not self._given:
                    self._work.wait()
            if self._given:
                vector, *details = self._given.popleft()
                begun.append(_Begun(vector, self._exchange(vector, *details)))
            one = min(begun, key=lambda its: its.passed)
            one.passed += 1
            try:
                next(one.stages)
                continue
            except StopIteration as end:
                self._done.append((one.vector, end.value))
            except NotFinite as error:
                self._done.append((one.vector, error))
            begun.remove(one)
            self._news.set()
