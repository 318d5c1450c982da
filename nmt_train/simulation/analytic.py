"""Compares the predictions of the Pipe-SGD equations for a cluster file with the results of the simulator."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nmt_train.common.errors import UserError
from nmt_train.config import Config
from nmt_train.distributed.codec import CODECS
from nmt_train.distributed.codec.codec import Codec
from nmt_train.distributed.override import OverrideConfig
from nmt_train.modes import build as modes
from nmt_train.simulation import equations
from nmt_train.simulation.cluster import ClusterConfig, DeviceConfig
from nmt_train.simulation.timing import Shapes, count, measure

SEGMENTS = 8  # L of Eq. 6


@dataclass(frozen=True)
class Symbols:
    """The symbols of the paper (see equations.py) for one cluster, model and codec; in seconds and bytes."""

    p: int
    n: float
    alpha: float
    beta: float
    gamma: float
    l_up: float
    l_for: float
    l_back: float

    @property
    def l_comm(self) -> float:
        return equations.ring(self.p, self.n, self.alpha, self.beta, self.gamma)

    @property
    def l_comp(self) -> float:
        return self.l_for + self.l_back


def symbols(cluster: ClusterConfig, elements: int, codec: Codec, tokens: float) -> Symbols:
    """The symbols for batches of `tokens` target tokens and a model of `elements` elements, before the cluster file's scale."""
    costs, ranks = cluster.device or DeviceConfig(), len(cluster.ranks())
    charged = cluster.scale.parameters if cluster.scale else float(elements)
    size = codec.encode_shape(torch.empty(elements, device="meta")).bytes / elements * charged
    link = cluster.network if len(cluster.nodes) > 1 else cluster.inside
    adding = costs.decode.per_unit + costs.encode.per_unit * codec.cost_elements(1)  # seconds per element
    return Symbols(
        p=ranks, n=size, alpha=link.latency, beta=1 / link.bandwidth, gamma=adding * charged / size,
        l_up=costs.update.of(charged), l_for=costs.forward.of(tokens), l_back=costs.backward.of(tokens),
    )  # fmt: skip


def predict(config: Config, cluster: ClusterConfig, shapes: Shapes, tokens: Sequence[int], steps: int) -> str:
    """Return a table of seconds per step and scaling efficiency. Raises UserError if the cluster has only one rank."""
    if len(cluster.ranks()) < 2:
        raise UserError("--model: the equations need several ranks, but the cluster has only one; give another cluster file")
    mean, elements = sum(tokens) / len(tokens), count(shapes)
    pipe = modes.row(dataclasses.replace(config, mode="pipe"))
    s = symbols(cluster.with_codec(pipe), elements, CODECS[pipe.up].build(config, 0.0), mean)
    whole = dataclasses.replace(config, exchange=dataclasses.replace(config.exchange, buckets=1))
    found = {
        mode: _seconds(dataclasses.replace(whole, mode=mode, override=override), cluster, shapes, tokens, steps)
        for mode, override in (("sync", OverrideConfig()), ("pipe", config.override))
    }
    dense = symbols(cluster, elements, CODECS["dense"].build(config, 0.0), mean)
    segments = equations.segmented_ring(s.p, s.n, SEGMENTS, s.alpha, s.beta, s.gamma)
    first = s.l_back / SEGMENTS
    rows = [
        ("sync, dense", "2", equations.total_sync(1, dense.l_up, dense.l_comp, dense.l_comm), found["sync"]),
        ("pipe, one after the other", "4, 5", equations.total_pipe(1, s.l_up, s.l_comp, s.l_comm), found["pipe"]),
        (f"pipe, in {SEGMENTS} segments", "6", max(s.l_up + s.l_for + first, segments), None),
        ("pipe, nothing shared", "3", equations.total_pipe_unlimited(1, 2, s.l_up, s.l_comp, s.l_comm), None),
    ]
    lines = ["system                      equation   s/step    simulated"]
    for name, equation, expected, simulated in rows:
        lines.append(f"{name:<28}{equation:<11}{expected:<10.4f}{'' if simulated is None else f'{simulated:.4f}'}".rstrip())
    efficiency = equations.scaling_efficiency(s.l_up, s.l_comp, s.l_comm)
    lines.append(f"{'scaling efficiency of pipe':<28}{'7':<11}{efficiency:<10.3f}{(s.l_up + s.l_comp) / found['pipe']:.3f}")
    return "\n".join(lines) + "\n"


def _seconds(config: Config, cluster: ClusterConfig, shapes: Shapes, tokens: Sequence[int], steps: int) -> float:
    """The simulated duration of a step."""
    return len(cluster.ranks()) * sum(tokens) / len(tokens) / measure(config, cluster, shapes, tokens, steps).words_per_second
