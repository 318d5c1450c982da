"""The faults of a simulated cluster and their times: network outages, machine failures and process failures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import simpy

from nmt_train.simulation.fluid import Shares
from nmt_train.simulation.kernel import Kernel
from nmt_train.simulation.network import Network

_NOTICED = 0.05  # seconds until MPI tells the other ranks that a process has ended


class Victim(Protocol):
    """A running cluster."""

    kernel: Kernel
    shares: Shares
    network: Network

    def kill(self, original_ranks: Sequence[int]) -> None:
        """End the processes of these ranks."""

    def notice(self) -> None:
        """Tell the other ranks that processes have ended."""

    def give_up(self, node: int, deadline: float) -> None:
        """Raise Lost in all other ranks, because the ranks of this machine have been silent for `deadline` seconds."""


def schedule(victim: Victim, deadline: float) -> None:
    """Schedule the faults of the cluster file; deadline: seconds of silence after which a rank is considered lost."""
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
        kernel.at(cut.until, partial(set_rate, cut.node, cluster.card(cut.node)))
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
