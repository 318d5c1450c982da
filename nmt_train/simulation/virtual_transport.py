"""The transport of a simulated rank: transfers and work take time on the virtual clock."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from nmt_train.common.message import Message
from nmt_train.simulation.kernel import Event, Future, Kernel, Lock, current
from nmt_train.transport import Aborted, Ended, Tag, describe, numbered
from nmt_train.transport.mailbox import Mailbox, count


@dataclass
class _Lane:
    """The undelivered messages from one sender to one receiver with one tag, in the order of sending."""

    waiting: deque[list[Any]] = field(default_factory=deque)  # [arrived?, message]


class Carrier(Protocol):
    """The functions of the simulated cluster that a rank uses."""

    kernel: Kernel

    def carry(self, sender: VirtualTransport, to: int, tag: Tag, message: Message, done: Future) -> None:
        """Move a message; `done` completes when the message has left the sender."""

    def add_up(self, rank: VirtualTransport, vector: Tensor, done: Future) -> None:
        """Once every rank has passed its vector, replace all vectors by their sum."""

    def now(self) -> float:
        """The time in seconds that the ranks see."""

    def compute(self, rank: VirtualTransport, name: str, work: float, seconds: float, parts: float) -> None:
        """Wait for the virtual time that this work takes. seconds: how long it took on the clock of `now`."""

    def stop(self, ranks: Collection[VirtualTransport], error: BaseException) -> None:
        """End every wait of these ranks."""

    def has_ended(self, rank: VirtualTransport) -> bool: ...

    def regroup(self, rank: VirtualTransport) -> VirtualTransport: ...

    def regroup_if_complete(self) -> None: ...


class VirtualTransport:
    """The transport of one simulated rank.

    original_rank: the rank's number in the cluster file, which stays the same when ranks are renumbered; peers: the transports
    of all ranks; lines: for each receiver, the messages that wait to leave; addends: this rank's vectors that are not summed
    yet.
    """

    parallel = False

    def __init__(
        self,
        carrier: Carrier,
        rank: int,
        original_ranks: Sequence[int],
        places: Sequence[int],
        peers: list[VirtualTransport],
        fault_tolerant: bool,
    ) -> None:
        """original_ranks, places: for each rank, its number in the cluster file and its machine."""
        self._carrier, self._kernel = carrier, carrier.kernel
        self.rank, self.size, self.peers = rank, len(original_ranks), peers
        self.original_rank: int = original_ranks[rank]
        self.nodes = numbered(places)
        self.hosts = tuple(f"node{place}" for place in places)
        self.lines: dict[int, deque[Callable[[], None]]] = defaultdict(deque)
        self.addends: deque[tuple[Tensor, Future]] = deque()
        self.sent: dict[Tag, list[int]] = defaultdict(lambda: [0, 0])
        self._mailbox = Mailbox[Future]()
        self.received = self._mailbox.received
        self.cpu = 0.0
        self.fault_tolerant, self.ended = fault_tolerant, ""
        self.observe: Callable[[str, str, float, float], None] | None = None
        self.failure: BaseException | None = None
        self._lanes: dict[tuple[int, Tag], _Lane] = defaultdict(_Lane)

    def send(self, to: int, tag: Tag, message: Message) -> Future:
        self.check()
        count(self.sent, tag, message)
        done = Future(self._kernel, f"the sending of {tag.name} to {describe(self, to)}")
        copied = Message(message.numbers, tuple(tensor.clone() for tensor in message.tensors))
        self._carrier.carry(self, to, tag, copied, done)
        return done

    def receive(self, source: int | None, tag: Tag) -> Future:
        sender = "anybody" if source is None else describe(self, source)
        future = Future(self._kernel, f"{tag.name} from {sender}")
        if (mail := self._mailbox.take(source, tag, future)) is not None:
            future.set_result(mail)
        return future

    def add_up(self, vector: Tensor, by: str = "mpi") -> Future:
        """Add in the order of the ranks, in the time that a ring all-reduce takes."""
        self.check()
        done = Future(self._kernel, "the sum of all ranks' vectors")
        self._carrier.add_up(self, vector, done)
        return done

    def departs(self, to: int, tag: Tag, message: Message) -> list[Any]:
        """Append a message to the order of delivery; return its entry [arrived?, message]."""
        entry = [False, message]
        self._lanes[to, tag].waiting.append(entry)
        return entry

    def arrived(self, source: int, tag: Tag, entry: list[Any]) -> None:
        """A message from `source` has arrived; deliver it once all messages sent before it have been delivered."""
        entry[0], lane = True, self.peers[source]._lanes[self.rank, tag]
        while lane.waiting and lane.waiting[0][0]:
            message = lane.waiting.popleft()[1]
            if (receiver := self._mailbox.put(source, tag, message)) is not None:
                receiver.set_result((source, message))

    def spawn(self, name: str, function: Callable[[], Any]) -> Future:
        return self._kernel.spawn(self, name, function).future

    def event(self) -> Event:
        return Event(self._kernel)

    def lock(self) -> Lock:
        return Lock(self._kernel)

    def now(self) -> float:
        return self._carrier.now()

    def task(self) -> str:
        return current().name

    def spend(self, name: str, work: float, seconds: float = 0.0, parts: float = 1) -> None:
        self._carrier.compute(self, name, work, seconds, parts)

    def watched(self, deadline: float) -> AbstractContextManager[None]:
        return nullcontext()  # the engine detects deadlocks

    def close(self) -> None:
        self._carrier.stop([self], Aborted("the transport is closed"))
        self._carrier.regroup_if_complete()

    def fail(self, error: BaseException) -> None:
        if self._carrier.has_ended(self):
            return  # the rank has ended, so it cannot tell the others
        self.failure = self.failure or error
        self._carrier.stop([self], error)
        self._carrier.stop(self.peers, Aborted(f"{describe(self, self.rank)} failed"))

    def regroup(self) -> VirtualTransport:
        return self._carrier.regroup(self)

    def check(self) -> None:
        """Raise the error of this transport, if it has failed, or Aborted if it is closed."""
        if isinstance(self.failure, Ended):
            raise Ended(*self.failure.args)  # a new exception each time: a shared one would keep the frames of all tasks alive
        if self.failure is not None:
            raise self.failure
