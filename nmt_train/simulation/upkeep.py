"""The share of the training time that checkpoints and recovery copies take, at most: as if training stood during the transfers.

A real run trains during them, and only shares the network with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nmt_train.common.duration import Duration, Pace
from nmt_train.config import Config
from nmt_train.simulation.cluster import ClusterConfig
from nmt_train.simulation.memory import to_come, unallocated
from nmt_train.strategy.plan import ServerPlan
from nmt_train.training.worker import Worker


@dataclass(frozen=True)
class Sizes:
    """What a rank has to send. state: its part of a checkpoint; copy: of its shard, for another machine [bytes]."""

    state: float
    copy: float

    @classmethod
    def of(cls, worker: Worker) -> Sizes:
        """The sizes of a worker whose vectors may have no values, and whose optimizers then have no states yet."""
        part, states = worker.part(), unallocated(worker.strategy.optimizer)
        shard = sum(vector.nbytes for vector in part.shard.values()) + (states if part.shard else 0)
        kept = sum(vector.nbytes for vector in part.worker_state.vectors().values()) + to_come(worker.strategy) - states
        sharded = isinstance(worker.plan.family, ServerPlan)
        return cls(shard + kept, shard if sharded and worker.transport.size > 1 else 0.0)


@dataclass(frozen=True)
class Speed:
    """Of all workers together: updates, target tokens and epochs per second."""

    updates: float
    tokens: float
    epochs: float

    def seconds(self, length: Duration) -> float:
        rate = {"u": self.updates, "t": self.tokens, "e": self.epochs}.get(length.unit, 1.0)
        return length.amount / rate if rate else math.inf


def share(config: Config, cluster: ClusterConfig, sizes: Sequence[Sizes], scale: float, speed: Speed) -> float:
    """The share of the time, from 0 to 1, for ranks that have to send these `sizes`. scale: as in `Network`."""
    if cluster.snapshots == "free":
        return 0.0
    ranks = cluster.ranks()
    node_of_leader = ranks[0]
    inside = sum(size.state for size, node in zip(sizes[1:], ranks[1:], strict=True) if node == node_of_leader)
    outside = sum(size.state for size, node in zip(sizes, ranks, strict=True) if node != node_of_leader)
    checkpoint = scale * (inside / cluster.inside.bandwidth + outside / cluster.card(node_of_leader))
    if len(cluster.nodes) > 1:
        sent = [
            sum(size.copy for size, at in zip(sizes, ranks, strict=True) if at == node) for node in range(len(cluster.nodes))
        ]
        copy = scale * max(size / cluster.card(node) for node, size in enumerate(sent))
    else:
        copy = scale * sum(size.copy for size in sizes) / cluster.inside.bandwidth
    taken = 0.0
    for seconds, every in ((checkpoint, config.checkpoint.every), (copy, config.recovery.every)):
        interval = Pace(every).lengthened(speed.seconds(every), seconds)
        taken += seconds / (interval + seconds if math.isfinite(interval) else math.inf)
    return min(taken, 1.0)
