"""The duration of synchronous training by the equations of Pipe-SGD (Li et al. 2018, section 3), in the paper's symbols.

Times are in seconds: an update takes l_up, the forward and backward pass of a batch l_comp, and an exchange l_comm. T is the
number of iterations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nmt_train.codec.codec import Codec
from nmt_train.simulation.cluster import ClusterConfig, DeviceConfig


def total_sync(T: float, l_up: float, l_comp: float, l_comm: float) -> float:  # noqa: N803
    """Eq. 2: no pipeline; update, computation and exchange run one after the other."""
    return T * (l_up + l_comp + l_comm)


def total_pipe_unlimited(T: float, K: int, l_up: float, l_comp: float, l_comm: float) -> float:  # noqa: N803
    """Eq. 3: a pipeline of width K whose stages share nothing."""
    return T / K * (l_up + l_comp + l_comm)


def total_pipe(T: float, l_up: float, l_comp: float, l_comm: float) -> float:  # noqa: N803
    """Eq. 4: a pipeline of any width from 2 on, whose stages share one processor and one network."""
    return T * max(l_up + l_comp, l_comm)


def ring(p: int, n: float, alpha: float, beta: float, gamma: float, S: float = 0.0) -> float:  # noqa: N803
    """The exchange in Eq. 5: p workers sum n bytes around a ring.

    alpha: latency; beta: seconds to send a byte; gamma: seconds to add a byte; S: seconds to synchronize.
    """
    share = (p - 1) / p
    return 2 * (p - 1) * alpha + 2 * share * n * beta + share * n * gamma + S


def segmented_ring(p: int, n: float, L: int, alpha: float, beta: float, gamma: float, S: float = 0.0) -> float:  # noqa: N803
    """The exchange in Eq. 6: the bytes are summed in L segments, each as soon as it is computed."""
    share = (p - 1) / p
    return 2 * (p - 1) * L * alpha + 2 * share * n * beta + share * n * gamma + L * S


def scaling_efficiency(l_up: float, l_comp: float, l_comm: float) -> float:
    """Eq. 7: the speed of a pipeline of p workers, as a fraction of p times the speed of one worker."""
    return (l_up + l_comp) / max(l_up + l_comp, l_comm)


@dataclass(frozen=True)
class Symbols:
    """The symbols of the paper for one cluster, model and codec; in seconds and bytes."""

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
        return ring(self.p, self.n, self.alpha, self.beta, self.gamma)

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
