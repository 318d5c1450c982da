"""Over what messages travel: the protocol that every transport follows, and what may go wrong on it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import Any, Protocol, TypeVar

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from nmt_train.common.errors import TRY_AGAIN, UserError
from nmt_train.common.section import STRICT
from nmt_train.distributed.message import Message

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, config=STRICT)
class TransportConfig:
    """How ranks reach each other, and how long they wait for one another."""

    deadline: float = Field(
        default=60.0,
        ge=1,
        le=86400,
        description="a rank that is silent for this long is considered lost, and training ends; a rank whose computation"
        " takes ten times as long ends itself [seconds]",
    )
    start_deadline: float = Field(
        default=120.0, ge=1, le=86400, description="maximum time for all ranks to connect at the start [seconds]"
    )
    chunk: int = Field(
        default=1 << 20, ge=1 << 10, le=1 << 30, description="longer tensors are sent in chunks of this size [bytes]"
    )
    longest: int = Field(
        default=8 << 30, ge=1 << 20, le=1 << 50, description="messages that claim to be longer are refused [bytes]"
    )


class Tag(IntEnum):
    """Kinds of messages; traffic is counted by them."""

    PUSH = 1  # a worker's gradient (or update) for a shard
    ANSWER = 2  # a shard's parameters or delta for a worker
    NODE = 3  # gradients and parameters between the ranks of a node
    CHANNEL = 4  # a rank asks to communicate for its node, or has done
    GRANT = 9  # it may
    COPY = 15  # of a shard, for the rank that keeps it
    STATE = 5  # parameters, optimizer states and residuals, to and from rank 0
    PULL = 10  # a worker's wish for a shard's parameters as they are, while all rest
    PULLED = 11  # these
    CONTROL = 6  # what rank 0 decides
    REPORT = 7  # what the others have done
    HELLO = 8  # the comparison at the start
    RING = 12  # a part of a sum over all ranks, to the next rank
    PEER = 14  # what a worker changes, for all others
    REPLICA = 13  # a checksum of what all ranks should have alike


# What grows with the model: what training sends, and, of whole vectors with facts about them, the vectors.
_ENCODED = frozenset({Tag.PUSH, Tag.ANSWER, Tag.NODE, Tag.GRANT, Tag.RING, Tag.PEER})
WHOLE = frozenset({Tag.COPY, Tag.STATE, Tag.PULL, Tag.PULLED})
OF_MODEL = _ENCODED | WHOLE
# What spans call messages that arrive (True) or leave.
NAMES = {
    (Tag.PUSH, True): "receive gradients", (Tag.ANSWER, False): "send parameters",
    (Tag.PUSH, False): "send gradients", (Tag.ANSWER, True): "receive parameters",
    (Tag.PEER, False): "send changes", (Tag.PEER, True): "receive changes",
    (Tag.RING, False): "send sums", (Tag.RING, True): "receive sums",
}  # fmt: skip


def of_model(tag: Tag, message: Message) -> int:
    """How many bytes of a message grow with the model."""
    if tag in _ENCODED:
        return message.bytes
    vectors = [tensor for tensor in message.tensors if tensor.is_floating_point() and tensor.numel() > 1]
    return sum(vector.numel() * vector.element_size() for vector in vectors) if tag in WHOLE else 0


class Lost(UserError):
    """Another rank went silent or ended; the message says which, on which host, and for how long.

    A new start may help, which the exit status says to nmt-train --restarts.
    """

    status = TRY_AGAIN


class Ended(Lost):
    """Processes of other ranks have ended; those that are left may `regroup`."""


class Aborted(Lost):
    """Another rank failed and has itself said why."""


class Future(Protocol[T_co]):
    def done(self) -> bool: ...

    def result(self) -> T_co:
        """Wait for it; Lost if its sender goes silent first, or whatever the task behind it raised."""


class Event(Protocol):
    """Something that one task waits for and another brings about, as often as they like."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def is_set(self) -> bool: ...

    def wait(self) -> None:
        """Return once set; Aborted if the transport is closed or has failed before."""


class Transport(Protocol):
    """`nodes[r]` is the node of rank r, `hosts[r]` its host's name; nodes are numbered in order of their first ranks.

    Messages of one sender, receiver and tag arrive in the order in which they were sent.
    """

    rank: int
    size: int
    nodes: tuple[int, ...]
    hosts: tuple[str, ...]
    sent: dict[Tag, list[int]]  # by tag: messages, bytes
    received: dict[Tag, list[int]]
    fault_tolerant: bool  # where processes end, those that are left can regroup
    ended: str  # who had ended before they last did
    parallel: bool  # tasks go on while another computes; else only while it waits, or spends time
    cpu: float  # seconds of a core that carrying messages has taken so far
    observe: Callable[[str, str, float, float], None] | None  # is told of transfers: name, thread, start and end on `now`

    def send(self, to: int, tag: Tag, message: Message) -> Future[None]:
        """The tensors must stay as they are until the future is done."""

    def receive(self, source: int | None, tag: Tag) -> Future[tuple[int, Message]]:
        """The next message with `tag` from `source` (None: from anybody), with its sender."""

    def add_up(self, vector: Tensor, by: str = "mpi") -> Future[None]:
        """Replace `vector` (elements,) by the sum of all ranks' vectors, which all add up in the same order.

        by: mpi, where it must be on the CPU, or torch.
        """

    def spawn(self, name: str, function: Callable[[], Any]) -> Future[None]:
        """Run `function` as a task beside this one; it must end when the transport is closed (its waits raise Aborted)."""

    def event(self) -> Event: ...

    def lock(self) -> AbstractContextManager[Any]: ...

    def now(self) -> float:
        """Seconds on rank 0's clock (real ones: since 1970), never running backwards. Who asks is alive (see `watched`)."""

    def task(self) -> str:
        """The name of the task that calls; a rank's first is MainThread."""

    def spend(self, name: str, work: float, seconds: float, parts: int = 1) -> None:
        """Work of this kind was done: target tokens of a batch, elements of a vector (see `Trace.span`), in so many seconds."""

    def watched(self, deadline: float) -> AbstractContextManager[None]:
        """A context in which a task that neither waits for anybody nor gives a sign of life ends this rank's process: after ten
        times `deadline` seconds, and twenty times as long as any has ever gone without one.
        """

    def close(self) -> None:
        """End together with the other ranks: call it when no message is under way."""

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks to end as well, and wake whoever waits here."""

    def regroup(self) -> Transport:
        """After Ended: this rank's end of a new transport among all that are left, numbered anew in their order.

        Waits for all of them. What was under way is lost, and tasks of the old transport have ended. Lost if it cannot be.
        """


def describe(transport: Transport, *ranks: int) -> str:
    """`rank 3 (host b)` for messages; several are joined by `and`."""
    return " and ".join(f"rank {rank} (host {transport.hosts[rank]})" for rank in ranks)


def numbered(places: Sequence[Hashable]) -> tuple[int, ...]:
    """The node of each rank, given where each is: numbers in order of their first ranks."""
    numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
    return tuple(numbers[place] for place in places)
