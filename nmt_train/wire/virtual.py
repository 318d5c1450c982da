"""The wire of a simulated cluster: all ranks in one process, on a clock that only what they do moves.

Tasks are greenlets: the blocking code of worker, schedule, exchange and server runs as it is, and where it waits, another task
goes on. Computation takes no virtual time by itself; `spend` says how long it would have taken.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import simpy
import torch
from greenlet import GreenletExit, getcurrent
from torch import Tensor

from nmt_train.errors import UserError
from nmt_train.message import Message
from nmt_train.wire import NAMES, OF_MODEL, Aborted, Lost, Tag, describe
from nmt_train.wire.fluid import SECOND, Shares
from nmt_train.wire.tasks import Lock, Receipt, Signal, Task, current

if TYPE_CHECKING:
    from nmt_train.wire.network import Network

Mail = tuple[int, Message]


@dataclass
class _Lane:
    """What one rank has sent to another under one tag and has not arrived in turn."""

    waiting: deque[list[Any]] = field(default_factory=deque)  # [arrived?, message]


class VirtualWire:
    """One rank's end. Everything that it does happens on the engine's clock."""

    parallel = False

    def __init__(self, engine: Engine, rank: int) -> None:
        network = engine.network
        self._engine, self.rank, self.size, self.nodes = engine, rank, len(network.nodes), network.nodes
        self.hosts = tuple(f"node{node}" for node in network.nodes)
        self.sent: dict[Tag, list[int]] = defaultdict(lambda: [0, 0])
        self.received: dict[Tag, list[int]] = defaultdict(lambda: [0, 0])
        self.cpu = 0.0
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
        entry[0], lane = True, self._engine.wires[source]._lanes[self.rank, tag]
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
        seconds = self._engine.network.seconds(self.rank, name, work, parts)
        if seconds:
            current().wait(self._engine.shares.use(seconds, self._engine.network.devices[self.rank]), f"its device, for {name}")

    def close(self) -> None:
        self._engine.stop([self], Aborted("the wire is closed"))

    def fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self._engine.stop([self], error)
        self._engine.stop(self._engine.wires, Aborted(f"{describe(self, self.rank)} failed"))

    def check(self) -> None:
        """Raise what went wrong on this wire, or Aborted when it is closed."""
        if self.failure is not None:
            raise self.failure


class Engine:
    """The clock, the tasks of all ranks, and what carries their messages."""

    def __init__(self, network: Network, random: bool = True, start: float = 0.0) -> None:
        """random: keep torch's generator apart for every rank; start: seconds on the clock, for what goes on."""
        self.env, self.hub, self.network = simpy.Environment(round(start * SECOND)), getcurrent(), network
        self.shares = Shares(self.env)
        self.tasks: dict[Task, None] = {}
        self._random: dict[int, Any] | None = {} if random else None
        self._entered = 0
        self._lines: dict[tuple[int, int], deque[Callable[[], None]]] = defaultdict(deque)
        self._addends: list[deque[tuple[Tensor, Receipt]]] = [deque() for _ in network.nodes]  # of each rank, to be summed
        self._dead: set[int] = set()  # ranks whose machines have crashed
        self.wires = [VirtualWire(self, rank) for rank in range(len(network.nodes))]
        network.watch(self)

    def run(self, mains: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one function as each rank, until all are done; what they return, or the first error that is nobody else's.

        UserError if ranks wait for what will never come, with what each task waits for.
        """
        tasks = [self.spawn(wire, "MainThread", main) for wire, main in zip(self.wires, mains, strict=True)]
        try:
            under_way = list(tasks)
            while under_way:
                if under_way[-1].receipt.done():
                    under_way.pop()
                elif self.env.peek() == float("inf"):
                    raise self._stuck()
                else:
                    self.env.step()
            while self.env.peek() == self.env.now:
                self.env.step()  # tasks that end with their ranks
        finally:
            for task in [task for task in self.tasks if not task.dead]:
                task.throw(GreenletExit)
        for wire in self.wires:
            if wire.failure is not None and not isinstance(wire.failure, Aborted):
                raise wire.failure
        return [task.receipt.result() for task in tasks]

    def _stuck(self) -> UserError:
        tasks = [task for task in self.tasks if task.waits_for]
        waits = [f"{describe(task.wire, task.wire.rank)}, {task.name}: {task.waits_for}" for task in tasks]
        return UserError(f"simulation: at {self.env.now / SECOND:.3f} s everybody waits for ever: {'; '.join(waits)}")

    def spawn(self, wire: VirtualWire, name: str, function: Callable[[], Any]) -> Task:
        task = Task(self, wire, name, function)
        self.tasks[task] = None
        return task

    def soon(self, callback: Callable[[simpy.Event], None]) -> None:
        self.env.timeout(0).callbacks.append(callback)

    def after(self, seconds: float, callback: Callable[[simpy.Event], None]) -> None:
        self.env.timeout(round(seconds * SECOND)).callbacks.append(callback)

    def at(self, seconds: float, callback: Callable[[simpy.Event], None]) -> None:
        """On the clock; what would have been before its start has been."""
        wait = round(seconds * SECOND) - int(self.env.now)
        if wait >= 0:
            self.env.timeout(wait).callbacks.append(callback)

    def enter(self, wire: VirtualWire) -> None:
        """A task of this rank goes on: torch's random numbers are its rank's."""
        if self._random is not None and wire.rank != self._entered:
            self._random[self._entered] = torch.get_rng_state()
            if wire.rank in self._random:
                torch.set_rng_state(self._random[wire.rank])
        self._entered = wire.rank

    def carry(self, wire: VirtualWire, to: int, tag: Tag, message: Message, done: Receipt) -> None:
        """Move a message at the speed of what it passes, all of which is shared, and deliver it in its turn.

        From one rank to another there is one connection: what it carries goes one after the other.
        """
        entry, start = wire.departs(to, tag, message), [wire.now()]
        route, line = self.network.route(wire.rank, to), self._lines[wire.rank, to]
        size = message.bytes * self.network.scale if tag in OF_MODEL else 0.0

        def leave() -> None:
            start[0] = wire.now()
            self.network.burden(self.shares, wire.rank, to, message.bytes)
            self.network.transfer(self.shares, size, route).callbacks.append(next_one)

        def next_one(event: simpy.Event) -> None:
            line.popleft()
            if line:
                line[0]()
            left(event)

        def left(event: simpy.Event) -> None:
            done.set()
            self._tell(wire, tag, False, start[0])
            self.after(route.latency + self.network.delay(wire.rank, to), arrived)

        def arrived(event: simpy.Event) -> None:
            self._tell(self.wires[to], tag, True, start[0])
            self.wires[to].arrived(wire.rank, tag, entry)

        if size and route.capacities:
            line.append(leave)
            if len(line) == 1:
                leave()
        else:
            self.soon(left)

    def add_up(self, wire: VirtualWire, vector: Tensor, done: Receipt) -> None:
        """Once all ranks have given a vector, replace each by the sum."""
        self._addends[wire.rank].append((vector, done))
        if not all(self._addends):
            return
        now, ranks = [addends.popleft() for addends in self._addends], len(self.wires)
        if not vector.is_meta:
            whole = torch.stack([its for its, _ in now]).sum(0)
            for its, _ in now:
                its.copy_(whole)
        size = 2 * (ranks - 1) / ranks * vector.numel() * vector.element_size() * self.network.scale
        for rank, (_, summed) in enumerate(now):
            route = self.network.route(rank, (rank + 1) % ranks)
            late = 2 * (ranks - 1) * route.latency
            passed = self.network.transfer(self.shares, size, route) if route.capacities else self.env.timeout(0)
            passed.callbacks.append(partial(self._summed, late, summed))

    def _summed(self, late: float, done: Receipt, event: simpy.Event) -> None:
        self.after(late, lambda event: done.set())

    def _tell(self, wire: VirtualWire, tag: Tag, arrives: bool, start: float) -> None:
        if (name := NAMES.get((tag, arrives))) and wire.observe is not None:
            wire.observe(name, "network in" if arrives else "network out", start, wire.now())

    def stop(self, wires: Sequence[VirtualWire], error: BaseException) -> None:
        """End every wait of these ranks but the present task's own, and all that they would begin."""
        for wire in wires:
            wire.failure = wire.failure or error
        for task in list(self.tasks):
            if task.wire in wires and task is not getcurrent():
                task.stop(task.wire.failure or error)

    def kill(self, node: int, event: simpy.Event) -> None:
        """A machine ends: its tasks with it, and nothing more comes from it."""
        for wire in self.wires:
            if self.network.nodes[wire.rank] == node:
                wire.failure = Lost(f"{describe(wire, wire.rank)} has crashed")
                self._dead.add(wire.rank)
        for task in list(self.tasks):
            if task.wire.rank in self._dead:
                task.stop(GreenletExit())

    def give_up(self, node: int, deadline: float, event: simpy.Event) -> None:
        """The others have waited long enough for a machine."""
        ranks = [rank for rank, its in enumerate(self.network.nodes) if its == node]
        lost = Lost(f"{describe(self.wires[ranks[0]], ranks[0])} has been silent for {deadline:g} s (wire.deadline)")
        for wire in self.wires:
            if wire.rank not in ranks:
                wire.failure = wire.failure or lost
                self.stop([wire], lost)


def _count(count: list[int], message: Message) -> None:
    count[0] += 1
    count[1] += message.bytes
