"""Measures how long codecs take that are slower or faster than that of mode sparse.

Some ranks exchange random gradients in this process, one task at a time; the time of their codecs is measured.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import defaultdict
from functools import partial

import torch

from nmt_train import device
from nmt_train.config import Config
from nmt_train.modes.auto import with_mode
from nmt_train.optim.config import OptimizerConfig
from nmt_train.simulation.cluster import ClusterConfig, CodecConfig, Cost, LinkConfig
from nmt_train.simulation.engine import Engine
from nmt_train.simulation.network import Network
from nmt_train.simulation.virtual_transport import VirtualTransport
from nmt_train.training.worker import Make
from nmt_train.transport import Transport
from nmt_train.transport.local import LocalTransport

_LOCAL = {"local.every": "1", "local.delay": "0"}
# For each codec, or exchange with codecs of its own: a mode with settings in which it is used.
MEASURED = {
    "low-bit": ("low-bit", {}),
    "powersgd": ("powersgd", {"replicas.codec": "half", "low_rank.rank": "8"}),
    # Decay 0 keeps what is encoded from growing.
    "tile-top-k": ("sparse-local", {"tiles.keep": "86", "tiles.decay": "0", **_LOCAL}),
    "threshold": ("strom", {}),
    "half": ("sync", {"replicas.codec": "half"}),
    "bf16": ("sync", {"replicas.codec": "bf16"}),
}  # fmt: skip
# More ranks encode smaller parts of a vector, which takes longer per element if the model is small.
_RANKS, _RANKS_OF_SMALL_MODELS, _SMALL = 2, 4, 20_000_000  # elements of a model
_VECTORS, _SHARE = 10, 0.5  # vectors of a rank, at most; of the memory that may be used
_SETTLING, _STEPS = 2, 4  # exchanges that are not measured and that are
_KINDS = ("encode", "decode")


def measure(config: Config, make: Make, transport: Transport, steps: int) -> dict[str, CodecConfig]:
    """The costs per element on the device of the workers that `make` builds, by codec; none if its memory does not suffice.

    transport: of the job, whose ranks all measure at the same time, without each other. steps: the most exchanges to measure.
    """
    config = dataclasses.replace(
        config,
        trace=True,  # makes spans wait for the work of a GPU
        # Of one size from the first update on, as later in training. If updates were much smaller, rounding of parameters would
        # make many elements equal, with which tile-top-k takes longer than in training.
        optimizer=OptimizerConfig(
            name="sgd", learning_rate=0.01, clip_norm=0, schedule="constant", warmup=0, async_warmup="unchanged"
        ),
    )
    flat = make(with_mode(config, "single", {}), LocalTransport()).flat
    elements, own = flat.parameters.numel(), flat.parameters.device
    del flat
    ranks = max(_RANKS, min(transport.size, _RANKS_OF_SMALL_MODELS if elements < _SMALL else _RANKS))
    here = transport.nodes.count(transport.nodes[transport.rank])
    if ranks * _VECTORS * 4 * elements > _SHARE * device.memory(own, config.devices, here):
        return {}
    found = {}
    for codec, (mode, settings) in MEASURED.items():
        found[codec] = _costs(with_mode(config, mode, settings), make, ranks, min(steps, _STEPS))
        device.release()
    return found


def _costs(config: Config, make: Make, ranks: int, exchanges: int) -> CodecConfig:
    link = LinkConfig(bandwidth=1e18)
    network = Network(ClusterConfig(nodes=[1] * ranks, network=link, inside=link), 1)
    engine = _RealTime(network, config.transport.deadline)
    engine.run([partial(_exchange, engine, make, config, transport, _SETTLING + exchanges) for transport in engine.transports])
    steps = [step for steps in engine.steps.values() for step in steps[_SETTLING:]]

    def cost(kind: str) -> Cost:
        return Cost(0.0, statistics.median(step[kind][1] / max(1.0, step[kind][0]) for step in steps))

    return CodecConfig(*map(cost, _KINDS))


def _exchange(engine: _RealTime, make: Make, config: Config, transport: VirtualTransport, exchanges: int) -> None:
    worker = make(config, transport)
    worker.strategy.refresh()
    for _ in range(exchanges):
        engine.steps[transport.rank].append(dict.fromkeys(_KINDS, (0.0, 0.0)))
        worker.strategy.backward(torch.zeros((), requires_grad=True), 1)
        with worker.trace.span("random numbers"):
            worker.flat.gradient.normal_()
        worker.strategy.step()
    worker.strategy.drain()


class _RealTime(Engine):
    """Runs the ranks in turn on a clock that shows real time.

    steps: of each rank, the elements of each kind of work and the seconds that it took.
    """

    def __init__(self, network: Network, deadline: float) -> None:
        self.steps: dict[int, list[dict[str, tuple[float, float]]]] = defaultdict(list)
        super().__init__(network, deadline)

    def now(self) -> float:
        return time.perf_counter()

    def compute(self, rank: VirtualTransport, name: str, work: float, seconds: float, parts: float) -> None:
        if name in _KINDS and self.steps[rank.rank]:
            step = self.steps[rank.rank][-1]
            step[name] = step[name][0] + work, step[name][1] + seconds
