"""A task that carries vectors while its worker computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torch import Tensor

from nmt_train.trace import Trace
from nmt_train.wire import Wire


class Courier:
    """Carries one vector after the other, in the order in which they are given: workers that give them in the same order meet.

    under_way: how many have been given and not been taken back.
    """

    def __init__(self, wire: Wire, trace: Trace, carry: Callable[[Tensor], None]) -> None:
        """`carry` is called in the task with every vector, and may change it."""
        self._trace, self._carry = trace, carry
        self._given, self._done = deque[Tensor](), deque[Tensor]()
        self.under_way = 0
        self._work, self._news = wire.event(), wire.event()
        self._task = wire.spawn("courier", self._carry_on)

    def give(self, vector: Tensor) -> None:
        self.under_way += 1
        self._given.append(vector)
        self._work.set()

    def take(self) -> Tensor:
        """Wait for the oldest that is under way; what `carry` has raised."""
        with self._trace.span("waiting"):
            while not self._done:
                self._news.clear()
                if self._task.done():
                    self._task.result()
                if not self._done:
                    self._news.wait()
        self.under_way -= 1
        return self._done.popleft()

    def _carry_on(self) -> None:
        while True:
            while not self._given:
                self._work.clear()
                if not self._given:
                    self._work.wait()
            vector = self._given.popleft()
            with self._trace.span("sync"):
                self._carry(vector)
            self._done.append(vector)
            self._news.set()
