"""A background task that exchanges vectors while its worker computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from nmt_train.common.errors import NotFinite
from nmt_train.trace import Trace
from nmt_train.transport import Tasks

T = TypeVar("T")
Stages = Generator[None, None, T]  # an exchange that yields between two stages


def in_one_stage(exchange: Callable[..., T]) -> Callable[..., Stages[T]]:
    """An exchange that is over before the next one begins."""

    def stages(*arguments: Any) -> Stages[T]:
        yield from ()  # makes this a generator, which yields nothing
        return exchange(*arguments)

    return stages


def finish(stages: Stages[T]) -> T:
    """Do all stages; returns the result of the exchange."""
    while True:
        try:
            next(stages)
        except StopIteration as end:
            return end.value


@dataclass(eq=False)
class _Begun(Generic[T]):
    """An exchange that has begun."""

    vector: Tensor
    stages: Stages[T]


class BackgroundTask(Generic[T]):
    """Exchanges vectors in the order of `give`; all workers must give them in the same order.

    An exchange may have stages: it yields before it waits for what others do. Vectors come in groups of a fixed number. In
    every round, the next vector of the group begins, and all that have begun pass one stage, the newest first. So what an old
    vector waits for happens while newer ones are sent; and all workers have all stages in the same order, so that none can
    wait for one that waits for it. For this, all vectors of a group must have the same number of stages, and only the last one
    may raise NotFinite.

    under_way: the number of vectors that have been given but not taken back. ready: whether `take` would not wait.
    """

    def __init__(
        self, tasks: Tasks, trace: Trace, exchange: Callable[..., Stages[T]], group: int = 1, name: str = "background task"
    ) -> None:
        """exchange: exchanges one vector, which it may change; the task calls it with the arguments of `give`.

        group: how many vectors are given in a row.
        """
        self._trace, self._exchange, self._group = trace, exchange, group
        self._given, self._done = deque[tuple[Any, ...]](), deque[tuple[Tensor, T | NotFinite]]()
        self.under_way = 0
        self._work, self._news = tasks.event(), tasks.event()
        self._task = tasks.spawn(name, self._run)

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
        if not self._done:
            with self._trace.span("waiting"):
                self._wait()
        self.under_way -= 1
        vector, result = self._done.popleft()
        if isinstance(result, NotFinite):
            raise result
        return vector, result

    def _wait(self) -> None:
        while not self._done:
            self._news.clear()
            if self._task.done():
                self._task.result()
            if not self._done:
                self._news.wait()

    def _run(self) -> None:
        begun = deque[_Begun[T]]()  # the newest first
        left = 0  # vectors of this group that have not begun
        while True:
            if left or not begun:
                left = (left or self._group) - 1
                begun.appendleft(self._begin())
            for one in list(begun):
                if self._passed(one):
                    begun.remove(one)

    def _begin(self) -> _Begun[T]:
        while not self._given:
            self._work.clear()
            if not self._given:
                self._work.wait()
        vector, *details = self._given.popleft()
        return _Begun(vector, self._exchange(vector, *details))

    def _passed(self, one: _Begun[T]) -> bool:
        """Do the next stage of an exchange; returns whether it was the last."""
        try:
            next(one.stages)
            return False
        except StopIteration as end:
            self._done.append((one.vector, end.value))
        except NotFinite as error:
            self._done.append((one.vector, error))
        self._news.set()
        return True
