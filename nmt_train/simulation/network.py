"""What a simulated cluster is to its ranks: how long work and messages take, what they share, and what goes wrong when."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import simpy

from nmt_train.distributed.message import Message
from nmt_train.distributed.transport import WHOLE, Tag, of_model
from nmt_train.simulation.cluster import ClusterConfig, Cost, DeviceConfig
from nmt_train.simulation.fluid import Capacity, Shares

if TYPE_CHECKING:
    from nmt_train.simulation.engine import Engine

_NOTICED = 0.05  # seconds until MPI tells the others that a process has ended
_BY_TOKENS = ("forward", "backward")


@dataclass(frozen=True)
class Route:
    """What a message passes, all at once, and how long its last byte is then on its way."""

    capacities: tuple[Capacity, ...]
    latency: float


class Network:
    """The cluster of a file, in motion. `scale`: elements charged for each element that there is.

    only_training: snapshots, and what ranks begin with, are not charged, where only the speed of training is asked for.
    """

    def __init__(
        self, cluster: ClusterConfig, elements: int, deadline: float, shuffle_seed: int | None = None,
        only_training: bool = False,
    ) -> None:  # fmt: skip
        self.cluster, self.nodes = cluster, cluster.ranks()
        self.scale = cluster.scale.parameters / elements if cluster.scale else 1.0
        self._only_training = only_training
        self._costs, self._deadline = cluster.device or DeviceConfig(), deadline
        self.devices = [Capacity(1.0) for _ in self.nodes]
        self._out, self._in = ([Capacity(cluster.inside.bandwidth) for _ in self.nodes] for _ in range(2))
        self._buses = [Capacity(cluster.bus) for _ in cluster.nodes] if cluster.bus else None
        self._cards_out, self._cards_in = ([Capacity(cluster.network.bandwidth) for _ in cluster.nodes] for _ in range(2))
        self._slower = defaultdict(lambda: 1.0, {straggler.rank: straggler.factor for straggler in cluster.stragglers})
        self._random = [np.random.default_rng([cluster.seed, rank]) for rank in range(len(self.nodes))]
        self._shuffle = None if shuffle_seed is None else np.random.default_rng(shuffle_seed)

    def seconds(self, rank: int, name: str, work: float, parts: int = 1) -> float:
        """How long one of equal parts of work of this kind would take a rank's device if it did nothing else."""
        cost = getattr(self._costs, name, None)
        if cost is None:
            return 0.0
        seconds = cost.of(work if name in _BY_TOKENS else work * self.scale) / parts * self._slower[rank]
        if self.cluster.jitter:
            deviation = self.cluster.jitter * math.sqrt(parts)  # so that of the whole is as large as without parts
            seconds *= max(0.0, 1 + deviation * self._random[rank].standard_normal())
        return float(seconds)

    def size(self, tag: Tag, message: Message) -> float:
        """The bytes that a message is charged with."""
        return 0.0 if self._only_training and tag in WHOLE else of_model(tag, message) * self.scale

    def route(self, start: int, end: int) -> Route:
        one, other = self.nodes[start], self.nodes[end]
        if start == end:
            return Route((), 0.0)
        if one == other:
            bus = (self._buses[one],) if self._buses else ()
            return Route((self._out[start], *bus, self._in[end]), self.cluster.inside.latency)
        return Route((self._cards_out[one], self._cards_in[other]), self.cluster.network.latency)

    def transfer(self, shares: Shares, size: float, route: Route) -> simpy.Event:
        """What happens when `size` bytes have passed what they pass."""
        pass_on = shares.use if self.cluster.transfers == "share" else shares.turn
        return pass_on(size, *route.capacities)

    def burden(self, shares: Shares, start: int, end: int, size: int) -> None:
        """Charge the devices at both ends for carrying a message of `size` bytes."""
        if self.nodes[start] != self.nodes[end] and self._costs.carry != Cost():
            for rank in (start, end):
                shares.use(self.seconds(rank, "carry", size), self.devices[rank])

    def delay(self, start: int, end: int) -> float:
        """How much later than the route says a message comes."""
        late = 0.0
        if self.nodes[start] != self.nodes[end]:
            while self.cluster.loss and self._random[start].random() < self.cluster.loss:
                late += self.cluster.resend
        if self._shuffle is not None and start != end:
            late += self._shuffle.random() * (self._costs.forward.of(1000) + self._costs.backward.of(1000))
        return late

    def watch(self, engine: Engine) -> None:
        """Let happen what the cluster file says goes wrong."""
        for cut in self.cluster.cuts:
            engine.at(cut.at, partial(self._cards, engine, cut.node, 0.0))
            engine.at(cut.until, partial(self._cards, engine, cut.node, self.cluster.network.bandwidth))
            if cut.until - cut.at > self._deadline:
                engine.at(cut.at + self._deadline, partial(engine.give_up, cut.node, self._deadline))
        for crash in self.cluster.crashes:
            seats = [seat for seat, node in enumerate(self.nodes) if node == crash.node]
            engine.at(crash.at, partial(self._cards, engine, crash.node, 0.0))
            engine.at(crash.at, partial(engine.kill, seats))
            engine.at(crash.at + self._deadline, partial(engine.give_up, crash.node, self._deadline))
        for kill in self.cluster.kills:
            engine.at(kill.at, partial(engine.kill, [kill.rank]))
            engine.at(kill.at + _NOTICED, engine.notice)

    def _cards(self, engine: Engine, node: int, rate: float, event: simpy.Event) -> None:
        for card in (self._cards_out[node], self._cards_in[node]):
            card.rate = rate
            engine.shares.change(card)
