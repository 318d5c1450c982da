"""How long work and messages take on a simulated cluster, and which devices and links they share."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import simpy

from nmt_train.common.message import Message
from nmt_train.simulation.cluster import ClusterConfig, Cost, DeviceConfig
from nmt_train.simulation.fluid import Capacity, Shares
from nmt_train.transport import WHOLE, Tag, of_model

_BY_TOKENS = ("forward", "backward")


@dataclass(frozen=True)
class Route:
    """The capacities that a message uses at the same time, and the latency of its last byte."""

    capacities: tuple[Capacity, ...]
    latency: float


class Network:
    """The devices and links of a cluster file during a simulation. scale: number of elements charged per actual element.

    elements: the size of the model. shuffle_seed: if given, delay messages randomly. only_training: do not charge for
    snapshots and for the initial state of ranks, to measure only the training speed.
    """

    def __init__(
        self, cluster: ClusterConfig, elements: int, shuffle_seed: int | None = None, only_training: bool = False
    ) -> None:
        self.cluster, self.nodes = cluster, cluster.ranks()
        self.scale = cluster.scale.parameters / elements if cluster.scale else 1.0
        self._charged_between = cluster.scale.network_bytes if cluster.scale else 1.0
        self._only_training = only_training or cluster.snapshots == "free"
        self._costs = cluster.device or DeviceConfig()
        self.devices = [Capacity(1.0) for _ in self.nodes]
        self._out, self._in = ([Capacity(cluster.inside.bandwidth) for _ in self.nodes] for _ in range(2))
        self._to_host, self._from_host = ([Capacity(cluster.host or 1.0) for _ in self.nodes] for _ in range(2))
        self._buses = [Capacity(cluster.bus) for _ in cluster.nodes] if cluster.bus else None
        self._cards_out, self._cards_in = (
            [Capacity(cluster.card(node)) for node in range(len(cluster.nodes))] for _ in range(2)
        )
        self._slower = defaultdict(lambda: 1.0, {straggler.rank: straggler.factor for straggler in cluster.stragglers})
        self._random = [np.random.default_rng([cluster.seed, rank]) for rank in range(len(self.nodes))]
        self._shuffle = None if shuffle_seed is None else np.random.default_rng(shuffle_seed)

    def seconds(self, rank: int, name: str, work: float, parts: float = 1) -> float:
        """Seconds that a rank's device needs for one of `parts` parts of this work if the device does nothing else."""
        cost = getattr(self._costs, name, None)
        if cost is None:
            return 0.0
        seconds = cost.of(work if name in _BY_TOKENS else work * self.scale) / parts * self._slower[rank]
        if self.cluster.jitter:
            deviation = self.cluster.jitter * math.sqrt(parts)  # the sum then deviates like undivided work
            seconds *= max(0.0, 1 + deviation * self._random[rank].standard_normal())
        return float(seconds)

    def size(self, tag: Tag, message: Message, start: int, end: int) -> float:
        """The number of bytes charged for a message from one rank to another."""
        return 0.0 if self._only_training and tag in WHOLE else self.charged(of_model(tag, message), start, end)

    def charged(self, size: float, start: int, end: int) -> float:
        """The number of bytes charged for `size` bytes of the model's vectors."""
        return size * self.scale * (1.0 if self.nodes[start] == self.nodes[end] else self._charged_between)

    def route(self, start: int, end: int) -> Route:
        one, other = self.nodes[start], self.nodes[end]
        if start == end:
            return Route((), 0.0)
        if one == other:
            return Route((self._out[start], *self._bus(one), self._in[end]), self.cluster.inside.latency)
        return Route((self._cards_out[one], self._cards_in[other]), self.cluster.network.latency)

    def _bus(self, node: int) -> tuple[Capacity, ...]:
        return (self._buses[node],) if self._buses else ()

    def copies(self, start: int, end: int) -> tuple[Route, ...]:
        """The copies between the memory of a device and of its machine, before a message leaves and when it has arrived."""
        one, other = self.nodes[start], self.nodes[end]
        if one == other or self.cluster.host is None:
            return ()
        return Route((self._to_host[start], *self._bus(one)), 0.0), Route((self._from_host[end], *self._bus(other)), 0.0)

    def transfer(self, shares: Shares, size: float, route: Route) -> simpy.Event:
        """An event that triggers when `size` bytes have passed all capacities of the route."""
        pass_on = shares.use if self.cluster.transfers == "share" else shares.turn
        return pass_on(size, *route.capacities)

    def burden(self, shares: Shares, start: int, end: int, size: float, messages: int = 1) -> None:
        """Charge the devices at both ends for carrying messages of `size` bytes in all."""
        if self.nodes[start] != self.nodes[end] and self._costs.carry != Cost():
            for rank in (start, end):
                shares.use(messages * self.seconds(rank, "carry", size / messages), self.devices[rank])

    def delay(self, start: int, end: int) -> float:
        """Seconds by which a message is delayed beyond the latency of its route."""
        late = self.response(start, end)
        if self.nodes[start] != self.nodes[end]:
            while self.cluster.resend is not None and self._is_lost(start):
                late += self.cluster.resend
        if self._shuffle is not None and start != end:
            late += self._shuffle.random() * (self._costs.forward.of(1000) + self._costs.backward.of(1000))
        return late

    def loses_gradient(self, start: int, end: int) -> bool:
        """Whether a gradient on this way is lost for good."""
        return self.cluster.resend is None and self.nodes[start] != self.nodes[end] and self._is_lost(start)

    def _is_lost(self, start: int) -> bool:
        return self.cluster.loss > 0 and bool(self._random[start].random() < self.cluster.loss)

    def response(self, start: int, end: int) -> float:
        """Seconds until the receiver of a message notices it, beyond the latency of the network."""
        if self.nodes[start] == self.nodes[end] or not self.devices[end].uses:
            return 0.0
        return max(0.0, self._costs.response * self._slower[end] - self.cluster.network.latency)

    def set_rate(self, shares: Shares, node: int, rate: float) -> None:
        """Set the bandwidth of a machine's network card in each direction [bytes per second]."""
        for card in (self._cards_out[node], self._cards_in[node]):
            card.rate = rate
            shares.change(card)
