"""Several ranks on a virtual clock, for specifications; a cluster as its file would say it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nmt_train.common.message import Message
from nmt_train.simulation.cluster import ClusterConfig, Cost, DeviceConfig, LinkConfig
from nmt_train.simulation.engine import Engine
from nmt_train.simulation.network import Network
from nmt_train.simulation.virtual_transport import VirtualTransport
from nmt_train.transport import Tag

BANDWIDTH, LATENCY = 1000.0, 0.25  # bytes per second, seconds: whole numbers of nanoseconds in all that follows
DEVICE = DeviceConfig(forward=Cost("1s", "0s"), backward=Cost("2s", "0s"), update=Cost("0.5s", "0s"))


def cluster(nodes: Sequence[int], device: DeviceConfig = DEVICE, **changes: Any) -> ClusterConfig:
    link = LinkConfig(f"{BANDWIDTH:.0f} B/s", f"{LATENCY}s")
    return ClusterConfig(nodes=list(nodes), device=device, **{"network": link, "inside": link, **changes})


def engine(nodes: Sequence[int], shuffle_seed: int | None = None, **changes: Any) -> Engine:
    return Engine(Network(cluster(nodes, **changes), 1, shuffle_seed), 60.0)


def together(room: Engine, *functions: Callable[[VirtualTransport], Any]) -> list[Any]:
    """Run functions at the same virtual time, one as each rank, each given its transport; what they return."""
    return room.run(
        [lambda f=function, w=transport: f(w) for function, transport in zip(functions, room.transports, strict=True)]
    )


def everybody_is_here(transport: VirtualTransport) -> None:
    """Wait until all ranks have come here."""
    transport.send(0, Tag.REPORT, Message())
    if transport.rank == 0:
        for rank in range(transport.size):
            transport.receive(rank, Tag.REPORT).result()
        for rank in range(transport.size):
            transport.send(rank, Tag.CONTROL, Message())
    transport.receive(0, Tag.CONTROL).result()
