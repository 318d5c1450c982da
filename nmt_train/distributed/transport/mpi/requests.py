"""What the progress thread of the MPI transport has in hand: messages to be sent, vectors to be summed, transfers under way."""

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
    """A message on its way: how many of its MPI requests are open, and what is to be done when none is."""

    peer: int
    arrives: bool
    finish: Callable[[], None]
    open: int = 0
    later: deque[tuple[np.ndarray, int]] = field(default_factory=deque)  # pieces that wait for the one before, and their slot


@dataclass
class SendRequest:
    """A message that is to be sent."""

    to: int
    tag: int
    message: Message
    done: concurrent.futures.Future[None] = field(default_factory=concurrent.futures.Future)


@dataclass
class SumRequest:
    """A vector that is to be replaced by the sum of all ranks' vectors."""

    vector: np.ndarray
    done: LocalFuture
