"""The wire of a simulated cluster: all ranks in one process, on a clock that only what they do moves.

Tasks are greenlets: the blocking code of worker, schedule, exchange and server runs as it is, and where it waits, another task
goes on. Computation takes no virtual time by itself; `spend` says how long it would have taken.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nmt_train.distributed.message import Message
from nmt_train.distributed.transport import Aborted, Ended, Tag, describe, numbered
from nmt_train.simulation.fluid import SECOND
from nmt_train.simulation.kernel import Lock, Receipt, Signal, current

if TYPE_CHECKING:
    from nmt_train.simulation.engine import Engine

Mail = tuple[int, Message]


@dataclass
class _Lane:
    """What one rank has sent to another under one tag and has not arrived in turn."""

    waiting: deque[list[Any]] = field(default_factory=deque)  # [arrived?, message]


class VirtualWire:
    """One rank's end. Everything that it does happens on the engine's clock.

    seat: the rank's place in the cluster file, whatever it is numbered now; peers: the ends of all ranks. lines: of each peer
    what waits to leave for it; addends: what this rank has given to be summed.
    """

    parallel = False

    def __init__(self, engine: Engine, rank: int, seats: Sequence[int], peers: list[VirtualWire]) -> None:
        """seats: of all ranks."""
        places = [engine.network.nodes[seat] for seat in seats]
        self._engine, self.rank, self.size, self.peers = engine, rank, len(seats), peers
        self.seat: int = seats[rank]
        self.nodes = numbered(places)
        self.hosts = tuple(f"node{place}" for place in places)
        self.lines: dict[int, deque[Callable[[], None]]] = defaultdict(deque)
        self.addends: deque[tuple[Tensor, Receipt]] = deque()
        self.sent: dict[Tag, list[int]] = defaultdict(lambda: [0, 0])
        self.received: dict[Tag, list[int]] = defaultdict(lambda: [0, 0])
        self.cpu = 0.0
        self.survives, self.ended = bool(engine.network.cluster.kills), ""
        self.observe: Callable[[str, str, float, float], None] | None = None
        self.failure: BaseException | None = None
        self._mail: dict[Tag, deque[Mail]] = defaultdict(deque)
        self._wanted: dict[Tag, list[tuple[int | None, Receipt]]] = defaultdict(list)
        self._lanes: dict[tuple[int, Tag], _Lane] = defaultdict(_Lane)

    def send(self, to: int, tag: Tag, message: Message) -> Receipt:
        self.check()
        _count(self.sent[tag], message)
        done = Receipt(self._engine, f"the sending of {tag.name} to {describe(self, to)}")
        copied = Message(message.numbers, tuple(tensor.clone() for tensor in message.tensors))
        self._engine.carry(self, to, tag, copied, done)
        return done

    def receive(self, source: int | None, tag: Tag) -> Receipt:
        sender = "anybody" if source is None else describe(self, source)
        receipt = Receipt(self._engine, f"{tag.name} from {sender}")
        waiting = self._mail[tag]
        for place, mail in enumerate(waiting):
            if source is None or mail[0] == source:
                del waiting[place]
                receipt.set(mail)
                return receipt
        self._wanted[tag].append((source, receipt))
        return receipt

    def add_up(self, vector: Tensor, by: str = "mpi") -> Receipt:
        """As long as a ring takes for it, and in the order of the ranks."""
        self.check()
        done = Receipt(self._engine, "the sum of all ranks' vectors")
        self._engine.add_up(self, vector, done)
        return done

    def departs(self, to: int, tag: Tag, message: Message) -> list[Any]:
        """The place that a message for this rank takes in the order of its kind."""
        entry = [False, message]
        self._lanes[to, tag].waiting.append(entry)
        return entry

    def arrived(self, source: int, tag: Tag, entry: list[Any]) -> None:
        entry[0], lane = True, self.peers[source]._lanes[self.rank, tag]
        while lane.waiting and lane.waiting[0][0]:
            self._deliver(source, tag, lane.waiting.popleft()[1])

    def _deliver(self, source: int, tag: Tag, message: Message) -> None:
        _count(self.received[tag], message)
        for wanted in self._wanted[tag]:
            if wanted[0] is None or wanted[0] == source:
                self._wanted[tag].remove(wanted)
                wanted[1].set((source, message))
                return
        self._mail[tag].append((source, message))

    def spawn(self, name: str, function: Callable[[], Any]) -> Receipt:
        return self._engine.spawn(self, name, function).receipt

    def event(self) -> Signal:
        return Signal(self._engine)

    def lock(self) -> Lock:
        return Lock(self._engine)

    def now(self) -> float:
        return self._engine.env.now / SECOND

    def task(self) -> str:
        return current().name

    def spend(self, name: str, work: float, seconds: float = 0.0, parts: int = 1) -> None:
        seconds = self._engine.network.seconds(self.seat, name, work, parts)
        if seconds:
            current().wait(self._engine.shares.use(seconds, self._engine.network.devices[self.seat]), f"its device, for {name}")

    def watched(self, deadline: float) -> AbstractContextManager[None]:
        return nullcontext()  # the engine sees when nobody moves

    def close(self) -> None:
        self._engine.stop([self], Aborted("the wire is closed"))
        self._engine.regroup_if_complete()

    def fail(self, error: BaseException) -> None:
        if self._engine.has_ended(self):
            return  # nobody hears it
        self.failure = self.failure or error
        self._engine.stop([self], error)
        self._engine.stop(self.peers, Aborted(f"{describe(self, self.rank)} failed"))

    def regroup(self) -> VirtualWire:
        return self._engine.regroup(self)

    def check(self) -> None:
        """Raise what went wrong on this wire, or Aborted when it is closed."""
        if isinstance(self.failure, Ended):
            raise Ended(*self.failure.args)  # another each time: the wire's own would keep all frames that it has passed
        if self.failure is not None:
            raise self.failure


def _count(count: list[int], message: Message) -> None:
    count[0] += 1
    count[1] += message.bytes
