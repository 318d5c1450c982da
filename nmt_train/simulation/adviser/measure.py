"""Measures the machines of a job, and describes them as a cluster file: devices, network, connections inside machines."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass

import torch

from nmt_train.config import Config
from nmt_train.device import memory
from nmt_train.simulation import profile
from nmt_train.simulation.adviser.links import Link, between
from nmt_train.simulation.cluster import DeviceConfig
from nmt_train.simulation.cluster_file import to_yaml
from nmt_train.simulation.profile import Effort, Say
from nmt_train.training.worker import Make
from nmt_train.transport import Transport
from nmt_train.transport.collective import gather

_ALIKE = 1.05  # devices and network cards that differ by less than this factor are described as equal
_STEADY = 1.25  # a network whose bandwidth changes by more than this factor is not steady
_SENTENCE = 20  # target tokens of a sentence, roughly: only to compare devices with each other


@dataclass(frozen=True)
class Measured:
    """What rank 0 knows: nodes and hosts by rank, a profile of each rank's device, and the connections (None: there are none).

    tokens: target tokens of a batch, for which devices are compared. memory: the smallest of all devices [bytes]. later: the
    network, measured once more after the devices.
    """

    nodes: tuple[int, ...]
    hosts: tuple[str, ...]
    devices: tuple[DeviceConfig, ...]
    tokens: float
    memory: int
    network: Link | None
    inside: Link | None
    later: Link | None = None

    @property
    def paces(self) -> list[float]:
        """By rank: seconds of forward and backward of a batch."""
        return [device.forward.of(self.tokens) + device.backward.of(self.tokens) for device in self.devices]

    @property
    def warning(self) -> str:
        """A sentence if the network has changed while it was measured; else empty."""
        if self.network is None or self.later is None:
            return ""
        before, after = self.network.bandwidth, self.later.bandwidth
        if 1 / _STEADY < before / after < _STEADY:
            return ""
        return (
            f"warning: the network had {before / 1e6:.4g} MB/s at first, but {after / 1e6:.4g} MB/s some seconds later, so"
            " estimates may be wrong: something else uses it"
        )


def machines(
    config: Config, make: Make, own: torch.device, transport: Transport, effort: Effort, seconds: float, say: Say
) -> Measured | None:
    """Measure the devices and connections of all ranks (two or more), which call this together; returns the result on rank 0.

    make: builds the workers with which a device is measured. own: the device of this rank. seconds: of each measurement of a
    bandwidth. say: is told what is measured. Raises UserError for errors in the configuration.
    """
    say("measuring the connections")
    first = [transport.nodes.index(node) for node in dict.fromkeys(transport.nodes)]
    network = between(transport, first, seconds) if len(first) > 1 else None
    shared = next((node for node in range(len(first)) if transport.nodes.count(node) > 1), None)
    together = [rank for rank, node in enumerate(transport.nodes) if node == shared]
    inside = between(transport, together, seconds) if together else None
    costs = profile.measure(config, make, transport, effort, say)
    later = between(transport, first, seconds) if len(first) > 1 else None
    here = transport.nodes.count(transport.nodes[transport.rank])
    mine = {"memory": memory(own, config.devices, here), "costs": dataclasses.asdict(costs)}
    found = gather(transport, mine)
    if transport.rank:
        return None
    devices = [DeviceConfig(**its["costs"]) for its in found]
    tokens = float(config.batch.tokens if config.batch.sentences is None else _SENTENCE * config.batch.sentences)
    return Measured(
        transport.nodes, transport.hosts, tuple(devices), tokens, min(its["memory"] for its in found), network, inside, later
    )


def cluster_file(found: Measured) -> str:
    """The cluster file, with a comment on every figure."""
    counts = [found.nodes.count(node) for node in dict.fromkeys(found.nodes)]
    hosts = list(dict.fromkeys(zip(found.nodes, found.hosts, strict=True)))
    typical = found.paces.index(statistics.median_low(found.paces))
    lines = [
        "# Measured machines: " + ", ".join(host for _, host in hosts),
        f"nodes: {counts}          # devices of each machine",
        f"memory: {found.memory / 1e9:.3g} GB          # of each device",
        f"device:                  # of rank {typical} ({found.hosts[typical]}), the median of all",
        *(f"  {line}" for line in to_yaml(found.devices[typical], "").splitlines()[1:]),
        _link("network", "machine", found.network, found.inside),
        _link("inside", "device", found.inside, found.network),
    ]
    lines += [f"# {found.warning}"] * bool(found.warning)
    # In a cluster file, ranks are counted machine by machine.
    by_machine = sorted(range(len(found.nodes)), key=lambda rank: found.nodes.index(found.nodes[rank]))
    slow = [(place, found.paces[rank] / found.paces[typical]) for place, rank in enumerate(by_machine)]
    if stragglers := [f"{{rank: {rank}, factor: {factor:.3g}}}" for rank, factor in slow if not 1 / _ALIKE < factor < _ALIKE]:
        lines.append(f"stragglers: [{', '.join(stragglers)}]          # devices that are slower (or, below 1, faster)")
    if found.network and (
        cards := [
            f"{{node: {node}, bandwidth: {rate / 1e6:.4g} MB/s}}"
            for node, rate in enumerate(found.network.all) if not 1 / _ALIKE < rate / found.network.bandwidth < _ALIKE
        ]
    ):  # fmt: skip
        lines.append(f"cards: [{', '.join(cards)}]          # network cards of other speeds")
    return "\n".join(lines) + "\n"


def _link(name: str, sender: str, measured: Link | None, other: Link | None) -> str:
    """A line of the cluster file, which needs both connections; `other` stands in for one that there is not."""
    link = measured or other
    assert link is not None
    rates = ", ".join(f"{rate / 1e6:.4g}" for rate in link.all)
    said = f"one {sender} sends: {link.one / 1e6:.4g} MB/s; all send and receive: {rates} MB/s" if measured else "not used"
    return f"{name}: {{bandwidth: {link.bandwidth / 1e6:.4g} MB/s, latency: {link.latency * 1e6:.4g} us}}   # {said}"
