"""The work items of the MPI progress thread: messages to send, vectors to sum, and transfers in progress."""

from __future__ import annotations

import concurrent.futures
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from nmt_train.distributed.message import Message
from nmt_train.distributed.transport.local import LocalFuture


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
