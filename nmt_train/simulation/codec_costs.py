"""Measures how long encoding and decoding take in modes whose codecs differ from that of mode sparse.

Two to four ranks exchange random gradients in this process, one task at a time; the time of their codecs is measured.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import defaultdict
from functools import partial

import torch

from nmt_train.config import Config
from nmt_train.distributed.exchange.config import ExchangeConfig
from nmt_train.distributed.override import OverrideConfig
from nmt_train.simulation.cluster import ClusterConfig, CodecConfig, Cost, LinkConfig
from nmt_train.simulation.engine import Engine
from nmt_train.simulation.network import Network
from nmt_train.simulation.virtual_transport import VirtualTransport
from nmt_train.training.worker import Make

MEASURED = {  # the modes that are measured, and for each, those that have its codec
    "low-bit": ("low-bit",), "powersgd": ("powersgd",), "sparse-local": ("sparse-local", "sparse-local-async"),
}  # fmt: skip
_FEWEST, _MOST = 2, 4  # ranks: more would encode smaller parts of a vector, but take more time and memory
_SETTLING, _STEPS = 2, 5  # exchanges that are not measured and that are
_AT_ONCE = LinkConfig(bandwidth=1e18)
_NOTHING = {"encode": (0.0, 0.0), "decode": (0.0, 0.0)}


def measure(config: Config, make: Make, ranks: int) -> dict[str, CodecConfig]:
    """The costs per element on the device of the workers that `make` builds, by mode. ranks: of the job."""
    found = {mode: _costs(dataclasses.replace(config, mode=mode), make, min(max(ranks, _FEWEST), _MOST)) for mode in MEASURED}
    return {mode: found[measured] for measured, alike in MEASURED.items() for mode in alike}


def _costs(config: Config, make: Make, ranks: int) -> CodecConfig:
    config = dataclasses.replace(
        config,
        trace=True,  # makes spans wait for the work of a GPU
        override=OverrideConfig(),  # what other modes need may be refused in this one
        exchange=ExchangeConfig(),
        batch=dataclasses.replace(config.batch, accumulate=1),
        local=dataclasses.replace(config.local, every=1, delay=0),
    )
    cluster = ClusterConfig(nodes=[1] * ranks, network=_AT_ONCE, inside=_AT_ONCE)
    engine = _RealTime(Network(cluster, 1), config.transport.deadline)
    engine.run([partial(_exchange, engine, make, config, transport) for transport in engine.transports])
    steps = [step for steps in engine.steps.values() for step in steps[_SETTLING:]]
    return CodecConfig(**{
        kind: Cost(0.0, statistics.median(step[kind][1] / max(1.0, step[kind][0]) for step in steps)) for kind in _NOTHING
    })  # fmt: skip


def _exchange(engine: _RealTime, make: Make, config: Config, transport: VirtualTransport) -> None:
    worker = make(config, transport)
    worker.schedule.refresh()
    for _ in range(_SETTLING + _STEPS):
        engine.steps[transport.rank].append(dict(_NOTHING))
        worker.schedule.backward(torch.zeros((), requires_grad=True), 1)
        worker.flat.gradient.normal_()
        worker.schedule.step()
    worker.schedule.drain()


class _RealTime(Engine):
    """Runs ranks one after the other, whose clock shows real time. steps: of each rank, (elements, seconds) by kind of work."""

    def __init__(self, network: Network, deadline: float) -> None:
        self.steps: dict[int, list[dict[str, tuple[float, float]]]] = defaultdict(list)
        super().__init__(network, deadline)

    def now(self) -> float:
        return time.perf_counter()

    def compute(self, rank: VirtualTransport, name: str, work: float, seconds: float, parts: int) -> None:
        if name in _NOTHING and self.steps[rank.rank]:
            elements, before = self.steps[rank.rank][-1][name]
            self.steps[rank.rank][-1][name] = elements + work, before + seconds
