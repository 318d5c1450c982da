"""A task that carries vectors while its worker computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torch import Tensor

from nmt_train.distributed.exchange.ring import Reduction
from nmt_train.distributed.transport import Transport
from nmt_train.trace import Trace


class BackgroundTask:
    """Carries one vector after the other, in the order in which they are given: workers that give them in the same order meet.

    under_way: how many have been given and not been taken back.
    """

    def __init__(self, transport: Transport, trace: Trace, load_worker_state: Callable[[Tensor, int], Reduction]) -> None:
        """`carry` is called in the task with every vector and its weight, and may change the vector."""
        self._trace, self._carry = trace, load_worker_state
        self._given, self._done = deque[tuple[Tensor, int]](), deque[tuple[Tensor, Reduction]]()
        self.under_way = 0
        self._work, self._news = transport.event(), transport.event()
        self._task = transport.spawn("background task", self._run)

    def give(self, vector: Tensor, weight: int) -> None:
        self.under_way += 1
        self._given.append((vector, weight))
        self._work.set()

    def take(self) -> tuple[Tensor, Reduction]:
        """Wait for the oldest that is under way, and what `carry` said of it; what `carry` has raised."""
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
                joined = self._carry(vector, weight)
            self._done.append((vector, joined))
            self._news.set()
