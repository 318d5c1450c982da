"""A simulated cluster at work: its ranks on one clock, and what carries their messages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import simpy
import torch
from greenlet import GreenletExit
from torch import Tensor

from nmt_train.common.errors import UserError
from nmt_train.distributed.message import Message
from nmt_train.distributed.transport import NAMES, Aborted, Ended, Lost, Tag, describe
from nmt_train.simulation import faults
from nmt_train.simulation.fluid import Shares
from nmt_train.simulation.kernel import Future, Kernel, current
from nmt_train.simulation.network import Network
from nmt_train.simulation.virtual_transport import VirtualWire


class Engine:
    """The ranks of a cluster, and what moves between them."""

    def __init__(self, network: Network, deadline: float, random: bool = True, start: float = 0.0) -> None:
        """deadline: seconds after which silent ranks are given up; random: keep a state of torch's random generator for each
        rank; start: seconds on the clock at the beginning.
        """
        self.network, self.kernel = network, Kernel(self._enter, start)
        self.shares = Shares(self.kernel.env)
        self._random: dict[int, Any] | None = {} if random else None
        self._entered = 0  # the seat of the rank whose task runs
        self._dead: set[int] = set()  # seats of ranks that have ended
        self._coming: dict[int, simpy.Event] = {}  # seats of ranks that wait for the other survivors
        self.wires: list[VirtualWire] = []
        self._connect(range(len(network.nodes)))
        faults.schedule(self, deadline)

    def _connect(self, seats: Sequence[int]) -> None:
        places, survives = [self.network.nodes[seat] for seat in seats], bool(self.network.cluster.kills)
        wires: list[VirtualWire] = []
        wires.extend(VirtualWire(self, rank, seats, places, wires, survives) for rank in range(len(seats)))
        self.wires = wires

    def run(self, mains: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one function as each rank until all have returned: their results, without those of ranks that ended before; or
        the first error that is not another one's consequence.

        UserError if all ranks wait for something that cannot happen, with what each task waits for.
        """
        tasks = [self.kernel.spawn(wire, "MainThread", main) for wire, main in zip(self.wires, mains, strict=True)]
        try:
            if not self.kernel.run(tasks):
                raise self._stuck()
        finally:
            self.kernel.end_tasks()
        for wire in self.wires:
            if wire.failure is not None and not isinstance(wire.failure, Aborted) and wire.seat not in self._dead:
                raise wire.failure
        return [task.future.result() for task in tasks if task.owner.seat not in self._dead]  # type: ignore[attr-defined]

    def _stuck(self) -> UserError:
        waits = [
            f"{describe(task.owner, task.owner.rank)}, {task.name}: {task.waits_for}"  # type: ignore[arg-type, attr-defined]
            for task in self.kernel.tasks
            if task.waits_for
        ]
        return UserError(f"simulation: at {self.kernel.now():.3f} s everybody waits for ever: {'; '.join(waits)}")

    def _enter(self, wire: VirtualWire) -> None:
        """A task of this rank continues: torch's random numbers are its rank's."""
        if self._random is not None and wire.seat != self._entered:
            self._random[self._entered] = torch.get_rng_state()
            if wire.seat in self._random:
                torch.set_rng_state(self._random[wire.seat])
        self._entered = wire.seat

    def compute(self, rank: VirtualWire, name: str, work: float, parts: int) -> None:
        seconds = self.network.seconds(rank.seat, name, work, parts)
        if seconds:
            current().wait(self.shares.use(seconds, self.network.devices[rank.seat]), f"its device, for {name}")

    def carry(self, wire: VirtualWire, to: int, tag: Tag, message: Message, done: Future) -> None:
        """Move a message at the speed of what it passes, all of which is shared, and deliver it in its turn.

        From one rank to another there is one connection: what it carries goes one after the other.
        """
        entry, start, receiver = wire.departs(to, tag, message), [wire.now()], wire.peers[to]
        route, line = self.network.route(wire.seat, receiver.seat), wire.lines[to]
        size = self.network.size(tag, message)

        def leave() -> None:
            if isinstance(wire.failure, Ended):  # what still waits is lost
                line.clear()
                return
            start[0] = wire.now()
            self.network.burden(self.shares, wire.seat, receiver.seat, message.bytes)
            self.network.transfer(self.shares, size, route).callbacks.append(next_one)

        def next_one(event: simpy.Event) -> None:
            line.popleft()
            if line:
                line[0]()
            left(event)

        def left(event: simpy.Event) -> None:
            done.set_result()
            self._tell(wire, tag, False, start[0])
            self.kernel.after(route.latency + self.network.delay(wire.seat, receiver.seat), arrived)

        def arrived(event: simpy.Event) -> None:
            self._tell(receiver, tag, True, start[0])
            receiver.arrived(wire.rank, tag, entry)

        if size and route.capacities:
            line.append(leave)
            if len(line) == 1:
                leave()
        else:
            self.kernel.soon(left)

    def add_up(self, wire: VirtualWire, vector: Tensor, done: Future) -> None:
        """Once all ranks have given a vector, replace each by the sum."""
        wire.addends.append((vector, done))
        if not all(peer.addends for peer in wire.peers):
            return
        now, ranks = [peer.addends.popleft() for peer in wire.peers], wire.size
        if not vector.is_meta:
            whole = torch.stack([its for its, _ in now]).sum(0)
            for its, _ in now:
                its.copy_(whole)
        elements = vector.numel() * self.network.scale if vector.numel() > 1 else 0  # one number is not the model's
        size = 2 * (ranks - 1) / ranks * elements * vector.element_size()
        for peer, (_, summed) in zip(wire.peers, now, strict=True):
            route = self.network.route(peer.seat, wire.peers[(peer.rank + 1) % ranks].seat)
            late = 2 * (ranks - 1) * route.latency
            passed = self.network.transfer(self.shares, size, route) if route.capacities else self.kernel.env.timeout(0)
            passed.callbacks.append(partial(self._summed, late, summed))

    def _summed(self, late: float, done: Future, event: simpy.Event) -> None:
        self.kernel.after(late, lambda event: done.set_result())

    def _tell(self, wire: VirtualWire, tag: Tag, arrives: bool, start: float) -> None:
        if (name := NAMES.get((tag, arrives))) and wire.observe is not None:
            wire.observe(name, "network in" if arrives else "network out", start, wire.now())

    def stop(self, ranks: Collection[VirtualWire], error: BaseException) -> None:
        """End every wait of these ranks except the calling task's, and all that they would begin."""
        for wire in ranks:
            wire.failure = wire.failure or error
        self.kernel.stop(ranks, error)

    def kill(self, seats: Sequence[int]) -> None:
        """Processes end: their tasks with them, and nothing more comes from them."""
        self._dead.update(seats)
        for wire in self.wires:
            if wire.seat in seats:
                wire.failure = Lost(f"{describe(wire, wire.rank)} has ended")
        for task in list(self.kernel.tasks):
            if task.owner.seat in self._dead:  # type: ignore[attr-defined]
                task.stop(GreenletExit())
        for seat in seats:
            self._coming.pop(seat, None)
        self.regroup_if_complete()

    def has_ended(self, wire: VirtualWire) -> bool:
        return wire.seat in self._dead

    def notice(self) -> None:
        """The others see that processes have ended; what they wait for ends as well."""
        left = [wire for wire in self.wires if wire.seat not in self._dead and wire.failure is None]
        if any(wire.seat in self._dead for wire in self.wires):
            self.stop(left, Ended("another rank's process has ended"))

    def regroup(self, wire: VirtualWire) -> VirtualWire:
        """The rank's new end, when all that are left have come."""
        if not isinstance(wire.failure, Ended):
            raise wire.failure or Lost("no rank has ended")
        task, came = current(), simpy.Event(self.kernel.env)
        self._coming[wire.seat] = came
        self.regroup_if_complete()
        task.hold(came, "the ranks that are left")
        task.owner = following = next(its for its in self.wires if its.seat == wire.seat)
        return following

    def regroup_if_complete(self) -> None:
        """Connect those anew that are left, if all of them wait for it."""
        left = [wire for wire in self.wires if wire.seat not in self._dead and not isinstance(wire.failure, Aborted)]
        if self._coming and all(wire.seat in self._coming for wire in left):
            ended = describe(self.wires[0], *(wire.rank for wire in self.wires if wire.seat in self._dead))
            self._connect([wire.seat for wire in left])
            for wire in self.wires:
                wire.ended = ended
            coming, self._coming = self._coming, {}
            for came in coming.values():
                came.succeed()

    def give_up(self, node: int, deadline: float) -> None:
        """The others have waited long enough for a machine."""
        ranks = [wire.rank for wire in self.wires if self.network.nodes[wire.seat] == node]
        if not ranks:
            return  # they had ended before, one by one
        lost = Lost(f"{describe(self.wires[ranks[0]], ranks[0])} has been silent for {deadline:g} s (wire.deadline)")
        for wire in self.wires:
            if wire.rank not in ranks:
                wire.failure = wire.failure or lost
                self.stop([wire], lost)
