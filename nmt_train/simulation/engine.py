"""Runs a simulated cluster: executes all ranks on one virtual clock and carries their messages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import simpy
import torch
from greenlet import GreenletExit
from torch import Tensor

from nmt_train.common.errors import UserError
from nmt_train.common.message import Message
from nmt_train.simulation import faults
from nmt_train.simulation.delivery import Delivery
from nmt_train.simulation.fluid import Shares
from nmt_train.simulation.kernel import Future, Kernel, current
from nmt_train.simulation.network import Network
from nmt_train.simulation.server_turns import ServerTurns
from nmt_train.simulation.virtual_transport import VirtualTransport
from nmt_train.transport import Aborted, Ended, Lost, Tag, describe


class Engine:
    """The ranks of a cluster, and the messages between them."""

    def __init__(self, network: Network, deadline: float, random: bool = True, start: float = 0.0) -> None:
        """deadline: seconds of silence after which a rank is considered lost; random: keep a separate state of torch's random
        generator for each rank; start: seconds on the clock at the beginning.
        """
        self.network, self.kernel = network, Kernel(self._enter, start)
        self.shares = Shares(self.kernel.env)
        self._random: dict[int, Any] | None = {} if random else None
        self._entered = 0  # the original rank whose task runs
        self._dead: set[int] = set()  # original ranks that have ended
        self._coming: dict[int, simpy.Event] = {}  # original ranks that wait for the other survivors
        self.transports: list[VirtualTransport] = []
        self._connect(range(len(network.nodes)))
        faults.schedule(self, deadline)

    def _connect(self, original_ranks: Sequence[int]) -> None:
        self._turns = ServerTurns()
        places, fault_tolerant = [self.network.nodes[rank] for rank in original_ranks], bool(self.network.cluster.kills)
        self.transports = transports = list[VirtualTransport]()
        for rank in range(len(original_ranks)):
            transports.append(VirtualTransport(self, rank, original_ranks, places, transports, fault_tolerant))

    def _alive(self) -> list[VirtualTransport]:
        """The ranks whose processes have not ended."""
        return [transport for transport in self.transports if transport.original_rank not in self._dead]

    def run(self, mains: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one function per rank until all have returned; return their results, except those of ranks whose process ended.

        Raises the first error that is not a consequence of another rank's error. Raises UserError if all ranks wait for
        something that cannot happen; the message says what each task waits for.
        """
        tasks = [
            self.kernel.spawn(transport, "MainThread", main) for transport, main in zip(self.transports, mains, strict=True)
        ]
        try:
            if not self.kernel.run(tasks):
                raise self._stuck()
        finally:
            self.kernel.end_tasks()
        for transport in self._alive():
            if transport.failure is not None and not isinstance(transport.failure, Aborted):
                raise transport.failure
        return [task.future.result() for task in tasks if task.owner.original_rank not in self._dead]  # type: ignore[attr-defined]

    def _stuck(self) -> UserError:
        waits = [
            f"{describe(task.owner, task.owner.rank)}, {task.name}: {task.waits_for}"  # type: ignore[arg-type, attr-defined]
            for task in self.kernel.tasks
            if task.waits_for
        ]
        return UserError(f"simulation: at {self.kernel.now():.3f} s all tasks wait forever: {'; '.join(waits)}")

    def _enter(self, transport: VirtualTransport) -> None:
        """Called when a task of this rank continues: switches torch's random generator to the state of this rank."""
        if self._random is not None and transport.original_rank != self._entered:
            self._random[self._entered] = torch.get_rng_state()
            if transport.original_rank in self._random:
                torch.set_rng_state(self._random[transport.original_rank])
        self._entered = transport.original_rank

    def now(self) -> float:
        return self.kernel.now()

    def compute(self, rank: VirtualTransport, name: str, work: float, seconds: float, parts: float) -> None:
        seconds = self.network.seconds(rank.original_rank, name, work, parts)
        if seconds:
            current().wait(self.shares.use(seconds, self.network.devices[rank.original_rank]), f"its device, for {name}")

    def carry(self, transport: VirtualTransport, to: int, tag: Tag, message: Message, done: Future) -> None:
        # The turns are those of this group of ranks: after a regroup, there are others.
        Delivery(self.network, self.kernel, self.shares, self._turns, transport, to, tag, message, done).begin()

    def add_up(self, transport: VirtualTransport, vector: Tensor, done: Future) -> None:
        """Once every rank has called this, replace each of their vectors by the sum of all."""
        transport.addends.append((vector, done))
        if not all(peer.addends for peer in transport.peers):
            return
        now, ranks = [peer.addends.popleft() for peer in transport.peers], transport.size
        if not vector.is_meta:
            whole = torch.stack([its for its, _ in now]).sum(0)
            for its, _ in now:
                its.copy_(whole)
        elements = vector.numel() if vector.numel() > 1 else 0  # a single number is not model data
        size = 2 * (ranks - 1) / ranks * elements * vector.element_size()
        for peer, (_, summed) in zip(transport.peers, now, strict=True):
            ends = peer.original_rank, transport.peers[(peer.rank + 1) % ranks].original_rank
            route = self.network.route(*ends)
            self.network.burden(self.shares, *ends, size, 2 * (ranks - 1))
            late = 2 * (ranks - 1) * (route.latency + self.network.response(*ends))
            charged = self.network.charged(size, *ends)
            passed = self.network.transfer(self.shares, charged, route) if route.capacities else self.kernel.env.timeout(0)
            passed.callbacks.append(partial(self._summed, late, summed))

    def _summed(self, late: float, done: Future, event: simpy.Event) -> None:
        self.kernel.after(late, lambda event: done.set_result())

    def stop(self, ranks: Collection[VirtualTransport], error: BaseException) -> None:
        """End the current waits of these ranks, except that of the calling task, and every wait that they begin later."""
        for transport in ranks:
            transport.failure = transport.failure or error
        self.kernel.stop(ranks, error)

    def kill(self, original_ranks: Sequence[int]) -> None:
        """End these processes and all their tasks; they send nothing more."""
        self._dead.update(original_ranks)
        for transport in self.transports:
            if transport.original_rank in original_ranks:
                transport.failure = Lost(f"{describe(transport, transport.rank)} has ended")
        for task in list(self.kernel.tasks):
            if task.owner.original_rank in self._dead:  # type: ignore[attr-defined]
                task.stop(GreenletExit())
        for original_rank in original_ranks:
            self._coming.pop(original_rank, None)
        self.regroup_if_complete()

    def has_ended(self, transport: VirtualTransport) -> bool:
        return transport.original_rank in self._dead

    def notice(self) -> None:
        """Tell the surviving ranks that processes have ended; this ends all their waits."""
        alive = self._alive()
        if len(alive) < len(self.transports):
            left = [transport for transport in alive if transport.failure is None]
            self.stop(left, Ended("another rank's process has ended"))

    def regroup(self, transport: VirtualTransport) -> VirtualTransport:
        """Wait until all surviving ranks have called this; return the new transport of this rank."""
        if not isinstance(transport.failure, Ended):
            raise transport.failure or Lost("no rank has ended")
        task, came = current(), simpy.Event(self.kernel.env)
        self._coming[transport.original_rank] = came
        self.regroup_if_complete()
        task.hold(came, "the other surviving ranks")
        task.owner = following = next(its for its in self.transports if its.original_rank == transport.original_rank)
        return following

    def regroup_if_complete(self) -> None:
        """Create new transports for the surviving ranks if all of them wait in `regroup`."""
        left = [transport for transport in self._alive() if not isinstance(transport.failure, Aborted)]
        if self._coming and all(transport.original_rank in self._coming for transport in left):
            ended = describe(
                self.transports[0], *(transport.rank for transport in self.transports if transport.original_rank in self._dead)
            )
            self._connect([transport.original_rank for transport in left])
            for transport in self.transports:
                transport.ended = ended
            coming, self._coming = self._coming, {}
            for came in coming.values():
                came.succeed()

    def give_up(self, node: int, deadline: float) -> None:
        """Raise Lost in all other ranks, because the ranks of this machine have been silent for `deadline` seconds."""
        ranks = [transport.rank for transport in self.transports if self.network.nodes[transport.original_rank] == node]
        if not ranks:
            return  # the processes of its ranks had already ended
        lost = Lost(f"{describe(self.transports[ranks[0]], ranks[0])} has been silent for {deadline:g} s (transport.deadline)")
        for transport in self.transports:
            if transport.rank not in ranks:
                transport.failure = transport.failure or lost
                self.stop([transport], lost)
