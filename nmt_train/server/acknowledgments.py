"""Pushes that the shards have not acknowledged yet."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

from nmt_train.trace import Trace
from nmt_train.transport import Future, Tag, Transport


class Acknowledgments:
    def __init__(self, transport: Transport, trace: Trace) -> None:
        self._transport, self._trace = transport, trace
        self._expected: dict[int, deque[Future[Any]]] = defaultdict(deque)  # by rank of the shard

    def expect(self, ranks: Iterable[int]) -> None:
        """The shard of each of these ranks will acknowledge one more push."""
        for rank in ranks:
            self._expected[rank].append(self._transport.receive(rank, Tag.ANSWER))

    @property
    def most(self) -> int:
        """The largest number of unacknowledged pushes to one shard."""
        return max(map(len, self._expected.values()), default=0)

    def wait(self, most: int) -> int:
        """Wait until at most `most` pushes per shard are unacknowledged; return the shards' largest update count, or 0."""
        updates = 0
        for waiting in self._expected.values():
            while len(waiting) > most:
                with self._trace.span("waiting"):
                    updates = max(updates, waiting[0].result()[1].number())
                waiting.popleft()  # not before: if the wait fails, the push is unacknowledged
        return updates
