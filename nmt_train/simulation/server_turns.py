"""The single server thread of a machine (thesis 3.2, 3.6): it serves one worker of another machine at a time."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable


class ServerTurns:
    """Which worker each machine serves, and the pushes that wait for their turn, in the order of their arrival.

    A worker's turn begins with its push. It ends when all its pushes to this machine have been answered.
    """

    def __init__(self) -> None:
        self._served: dict[int, int] = {}  # by node: the worker that it serves
        self._unanswered: Counter[int] = Counter()  # by node: pushes of this worker
        self._waiting: dict[int, deque[tuple[int, Callable[[], None]]]] = {}

    def push(self, node: int, worker: int, begin: Callable[[], None]) -> None:
        """Call `begin` when it is the worker's turn."""
        if self._served.setdefault(node, worker) == worker:
            self._unanswered[node] += 1
            begin()
        else:
            self._waiting.setdefault(node, deque()).append((worker, begin))

    def answered(self, node: int) -> None:
        """A push has been answered; if it was the last one, the next worker's turn begins."""
        self._unanswered[node] -= 1
        if self._unanswered[node]:
            return
        del self._served[node]
        waiting = self._waiting.pop(node, deque())
        for worker, begin in waiting:  # the first one gets the turn; pushes of others wait again, in the same order
            self.push(node, worker, begin)
