"""What goes wrong in a simulated cluster, and when: links that are cut, machines and processes that end."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import simpy

from nmt_train.simulation.fluid import Shares
from nmt_train.simulation.kernel import Kernel
from nmt_train.simulation.network import Network

_NOTICED = 0.05  # seconds until MPI tells the others that a process has ended


class Victim(Protocol):
    """A running cluster."""

    kernel: Kernel
    shares: Shares
    network: Network

    def kill(self, original_ranks: Sequence[int]) -> None:
        """Processes end."""

    def notice(self) -> None:
        """The other ranks learn of it."""

    def give_up(self, node: int, deadline: float) -> None:
        """The other ranks have waited long enough for a machine."""


def schedule(victim: Victim, deadline: float) -> None:
    """Let the faults of the cluster file happen; deadline: seconds after which silent ranks are given up."""
    kernel, network = victim.kernel, victim.network
    cluster = network.cluster

    def set_rate(node: int, rate: float, event: simpy.Event) -> None:
        network.set_rate(victim.shares, node, rate)

    def kill(original_ranks: Sequence[int], event: simpy.Event) -> None:
        victim.kill(original_ranks)

    def give_up(node: int, event: simpy.Event) -> None:
        victim.give_up(node, deadline)

    for cut in cluster.cuts:
        kernel.at(cut.at, partial(set_rate, cut.node, 0.0))
        kernel.at(cut.until, partial(set_rate, cut.node, cluster.network.bandwidth))
        if cut.until - cut.at > deadline:
            kernel.at(cut.at + deadline, partial(give_up, cut.node))
    for crash in cluster.crashes:
        original_ranks = [original_rank for original_rank, node in enumerate(network.nodes) if node == crash.node]
        kernel.at(crash.at, partial(set_rate, crash.node, 0.0))
        kernel.at(crash.at, partial(kill, original_ranks))
        kernel.at(crash.at + deadline, partial(give_up, crash.node))
    for ended in cluster.kills:
        kernel.at(ended.at, partial(kill, [ended.rank]))
        kernel.at(ended.at + _NOTICED, lambda event: victim.notice())
