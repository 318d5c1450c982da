"""The work items of the MPI progress thread: messages to send, vectors to sum, transfers in progress and
their slots.
"""

from __future__ import annotations

import concurrent.futures
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from nmt_train.common.message import Message
from nmt_train.transport import Lost
from nmt_train.transport.local import LocalFuture
from nmt_train.transport.mpi.framing import SLOTS


@dataclass
class Transfer:
    """A message in transfer. open: the number of its open MPI requests; finish: called when no request is open."""

    peer: int
    arrives: bool
    finish: Callable[[], None]
    open: int = 0
    later: deque[tuple[np.ndarray, int]] = field(default_factory=deque)  # pieces waiting for the previous one, and their slot


@dataclass
class SendRequest:
    """A message to send."""

    to: int
    tag: int
    message: Message
    done: concurrent.futures.Future[None] = field(default_factory=concurrent.futures.Future)


@dataclass
class SumRequest:
    """A vector to replace by the sum of all ranks' vectors."""

    vector: np.ndarray
    done: LocalFuture


class Slots:
    """Allocates MPI tags for long messages, separately for each peer: no tag is used by two messages in flight to one peer."""

    def __init__(self) -> None:
        self._last: dict[int, int] = defaultdict(int)
        self._taken: dict[int, set[int]] = defaultdict(set)

    def take(self, peer: int) -> int:
        """The next free slot, counted from 1. Raises Lost if all are in use, which does not happen while the peer works."""
        taken = self._taken[peer]
        if len(taken) == SLOTS:
            raise Lost(f"rank {peer} receives nothing: {SLOTS:,} messages wait for it; look at what it does on its host")
        slot = self._last[peer] % SLOTS + 1
        while slot in taken:
            slot = slot % SLOTS + 1
        self._last[peer] = slot
        taken.add(slot)
        return slot

    def free(self, peer: int, slot: int) -> None:
        self._taken[peer].discard(slot)
