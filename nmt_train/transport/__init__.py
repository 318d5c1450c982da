"""Transports carry messages between ranks: the protocols that every transport implements, and its errors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import Any, Protocol, TypeVar

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from nmt_train.common.errors import TRY_AGAIN, UserError
from nmt_train.common.message import Message
from nmt_train.common.section import STRICT
from nmt_train.trace import Clock

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, config=STRICT)
class TransportConfig:
    """How ranks reach each other, and how long they wait for one another."""

    deadline: float = Field(
        default=60.0,
        ge=1,
        le=86400,
        description="a rank that is silent for this long is considered lost, and training ends; a rank that hangs in a"
        " computation for at least ten times as long ends itself [seconds]",
    )
    start_deadline: float = Field(
        default=120.0, ge=1, le=86400, description="maximum time for all ranks to connect at the start [seconds]"
    )
    longest: int = Field(
        default=8 << 30, ge=1 << 20, le=1 << 50, description="maximum size of a message; longer messages are rejected [bytes]"
    )


class Tag(IntEnum):
    """Kinds of messages; traffic is counted for each kind."""

    PUSH = 1  # a worker's gradient (or update) for a shard
    ANSWER = 2  # a shard's parameters or delta for a worker
    NODE = 3  # gradients and parameters between the ranks of a node
    CHANNEL = 4  # a rank requests its node's communication channel, or releases it
    GRANT = 9  # the answer to NODE or CHANNEL: the request is granted
    COPY = 15  # a copy of a shard, sent to the rank that stores it
    STATE = 5  # parameters, optimizer states and residuals, to and from rank 0
    PULL = 10  # a worker's request to a shard outside its pushes, mostly for the exact parameters
    PULLED = 11  # the answer to PULL
    CONTROL = 6  # orders from rank 0
    REPORT = 7  # reports of the other ranks to rank 0
    HELLO = 8  # setup at the start: hosts, clocks, and the comparison of the ranks' states
    REDUCE = 12  # a gradient, or a sum of some, sent to another worker
    MEAN = 16  # the mean of a part of all gradients, sent by the rank that owns the part
    PEER = 14  # a worker's changes, sent to all other workers
    REPLICA = 13  # a checksum of state that must be identical on all ranks


# Messages whose size grows with the model: in TRAINING, all tensors do; in WHOLE (initial parameters, snapshots), only the
# floating-point vectors.
TRAINING = frozenset({Tag.PUSH, Tag.ANSWER, Tag.NODE, Tag.GRANT, Tag.REDUCE, Tag.MEAN, Tag.PEER})
WHOLE = frozenset({Tag.COPY, Tag.STATE, Tag.PULL, Tag.PULLED})
OF_MODEL = TRAINING | WHOLE
# The span names for messages that arrive (True) or leave (False).
NAMES = {
    (Tag.PUSH, True): "receive gradients", (Tag.ANSWER, False): "send parameters",
    (Tag.PUSH, False): "send gradients", (Tag.ANSWER, True): "receive parameters",
    (Tag.PEER, False): "send changes", (Tag.PEER, True): "receive changes",
    (Tag.REDUCE, False): "send sums", (Tag.REDUCE, True): "receive sums",
    (Tag.MEAN, False): "send means", (Tag.MEAN, True): "receive means",
}  # fmt: skip


def of_model(tag: Tag, message: Message) -> int:
    """The bytes of a message that grow with the size of the model."""
    if tag in TRAINING:
        return message.bytes
    vectors = [tensor for tensor in message.tensors if tensor.is_floating_point() and tensor.numel() > 1]
    return sum(vector.numel() * vector.element_size() for vector in vectors) if tag in WHOLE else 0


class Lost(UserError):
    """Another rank went silent or ended; the message says which rank, on which host, and for how long.

    A restart may help, so the exit status is TRY_AGAIN, after which `nmt-train --restarts` starts again.
    """

    status = TRY_AGAIN


class Ended(Lost):
    """Processes of other ranks have ended; the surviving ranks may call `regroup`."""


class Aborted(Lost):
    """Another rank failed and has reported the reason itself."""


class Future(Protocol[T_co]):
    def done(self) -> bool: ...

    def result(self) -> T_co:
        """Wait for the value. Raises Lost if the sender goes silent first, or the exception that the task raised."""


class Event(Protocol):
    """A flag that one task waits for and another task sets; it can be cleared and set repeatedly."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def is_set(self) -> bool: ...

    def wait(self) -> None:
        """Wait until the event is set. Raises Aborted if the transport closes or fails first."""


class Messages(Protocol):
    """The ranks and the messages between them.

    `nodes[r]` is the node of rank r, `hosts[r]` its host's name; nodes are numbered in order of their first ranks. Messages of
    one sender, receiver and tag arrive in the order in which they were sent.
    """

    rank: int
    size: int
    nodes: tuple[int, ...]
    hosts: tuple[str, ...]

    def send(self, to: int, tag: Tag, message: Message) -> Future[None]:
        """Send a message to rank `to`. The caller must not change its tensors until the future is done."""

    def receive(self, source: int | None, tag: Tag) -> Future[tuple[int, Message]]:
        """The next message with `tag` from rank `source` (None: from any rank), as (sender, message)."""

    def add_up(self, vector: Tensor, by: str = "mpi") -> Future[None]:
        """All-reduce: replace `vector` (elements,) by the sum of all ranks' vectors; all ranks add them in the same order.

        by: mpi (the vector must be on the CPU) or torch.
        """


class Tasks(Protocol):
    """The concurrent tasks of a rank."""

    parallel: bool  # tasks run while another task computes; if False, only while the other waits or calls `spend`

    def spawn(self, name: str, function: Callable[[], Any]) -> Future[None]:
        """Run `function` as a concurrent task. It must end when the transport is closed: its waits then raise Aborted."""

    def event(self) -> Event: ...

    def lock(self) -> AbstractContextManager[Any]: ...


class Transport(Messages, Tasks, Clock, Protocol):
    """Messages, tasks, a clock, and what happens if ranks end."""

    sent: dict[Tag, list[int]]  # by tag: messages, bytes
    received: dict[Tag, list[int]]
    cpu: float  # CPU seconds that carrying messages has used so far
    observe: Callable[[str, str, float, float], None] | None  # called with a transfer's name, thread, start and end [s]
    fault_tolerant: bool  # if processes end, the surviving ranks can regroup
    ended: str  # names the ranks that had ended before the last `regroup`; empty: none

    def watched(self, deadline: float) -> AbstractContextManager[None]:
        """A context that ends this rank's process if a task hangs, that is, neither waits nor gives a sign of life.

        The limit is the larger of ten times `deadline` (in seconds) and twenty times the longest time that any task has gone
        without a sign of life.
        """

    def close(self) -> None:
        """Close the transport together with the other ranks. Call it when no message is in flight."""

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks to end too, and wake all waiting tasks of this rank."""

    def regroup(self) -> Transport:
        """After Ended: return a new transport between all surviving ranks, renumbered in their old order.

        Waits for all surviving ranks. Messages in flight are lost, and the tasks of the old transport have ended. Raises Lost
        if the ranks cannot regroup.
        """


def describe(transport: Messages, *ranks: int) -> str:
    """A text such as `rank 3 (host b)` for error messages; `and` joins several ranks."""
    return " and ".join(f"rank {rank} (host {transport.hosts[rank]})" for rank in ranks)


def numbered(places: Sequence[Hashable]) -> tuple[int, ...]:
    """Number the nodes in the order of their first ranks; returns each rank's node. places: any key of each rank's machine."""
    numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
    return tuple(numbers[place] for place in places)
