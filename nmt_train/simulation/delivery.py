"""The way of a message through the simulated network."""

from __future__ import annotations

import simpy

from nmt_train.common.message import Message
from nmt_train.server.requests import without_gradient
from nmt_train.simulation.fluid import Shares
from nmt_train.simulation.kernel import Future, Kernel
from nmt_train.simulation.network import Network, Route
from nmt_train.simulation.server_turns import ServerTurns
from nmt_train.simulation.virtual_transport import VirtualTransport
from nmt_train.transport import NAMES, Ended, Tag


class Delivery:
    """A message on its way. Each method is a stage, and begins when the previous one has ended.

    One connection leads from each rank to each other rank; it carries one message at a time. Messages of a tag are delivered in
    order. With `host` in the cluster file, a message to another machine is copied between device and machine at both ends.
    Where lost gradients stay lost, the shard still gets the request, so that it answers.
    """

    def __init__(
        self,
        network: Network,
        kernel: Kernel,
        shares: Shares,
        turns: ServerTurns,
        transport: VirtualTransport,
        to: int,
        tag: Tag,
        message: Message,
        done: Future,
    ) -> None:
        """done: set when the message has left."""
        self._network, self._kernel, self._shares, self._turns = network, kernel, shares, turns
        self._transport, self._receiver, self._tag, self._done = transport, transport.peers[to], tag, done
        self._entry, self._start, self._line = transport.departs(to, tag, message), transport.now(), transport.lines[to]
        self._ends = ends = (transport.original_rank, self._receiver.original_rank)
        self._route, self._copies = network.route(*ends), network.copies(*ends)
        self._size, self._bytes = network.size(tag, message, *ends), message.bytes
        self._here, self._there = (network.nodes[rank] for rank in ends)
        self._takes_turns = network.cluster.one_client_at_a_time and self._here != self._there

    def begin(self) -> None:
        if self._takes_turns and self._tag == Tag.PUSH:
            self._turns.push(self._there, self._transport.original_rank, self._queue)
        else:
            self._queue()

    def _queue(self) -> None:
        """Wait until the connection has carried all earlier messages."""
        if not (self._size and self._route.capacities):
            self._kernel.soon(self._left)
            return
        self._line.append(self._leave)
        if len(self._line) == 1:
            self._leave()

    def _leave(self) -> None:
        if isinstance(self._transport.failure, Ended):  # messages that have not left yet are lost
            self._line.clear()
            return
        self._start = self._transport.now()
        self._network.burden(self._shares, *self._ends, self._bytes)
        if self._copies:
            self._pass(self._copies[0]).callbacks.append(self._cross)
        else:
            self._cross()

    def _cross(self, event: simpy.Event | None = None) -> None:
        self._pass(self._route).callbacks.append(self._crossed)

    def _crossed(self, event: simpy.Event) -> None:
        self._line.popleft()
        if self._line:
            self._line[0]()
        self._left(event)

    def _left(self, event: simpy.Event) -> None:
        self._done.set_result()
        self._tell(self._transport, False)
        if self._takes_turns and self._tag == Tag.ANSWER:
            self._turns.answered(self._here)
        seconds = self._route.latency + self._network.delay(*self._ends)
        self._kernel.after(seconds, self._copy if self._size and self._copies else self._arrived)

    def _copy(self, event: simpy.Event) -> None:
        self._pass(self._copies[1]).callbacks.append(self._arrived)

    def _arrived(self, event: simpy.Event) -> None:
        self._tell(self._receiver, True)
        if self._tag == Tag.PUSH and self._network.loses_gradient(*self._ends):
            self._entry[1] = without_gradient(self._entry[1])
        self._receiver.arrived(self._transport.rank, self._tag, self._entry)

    def _pass(self, route: Route) -> simpy.Event:
        return self._network.transfer(self._shares, self._size, route)

    def _tell(self, transport: VirtualTransport, arrives: bool) -> None:
        if (name := NAMES.get((self._tag, arrives))) and transport.observe is not None:
            transport.observe(name, "network in" if arrives else "network out", self._start, transport.now())
