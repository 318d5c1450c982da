"""The table of modes. A new mode is a new row.

Sparse modes run the optimizer at the worker. A shard receives only a hundredth of a gradient at a time, so Adam's averages
there would get too little data. In these modes, workers therefore compute updates from their dense gradients, and the codec
drops elements of the updates (docs/archive/five-modes-two-hosts.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nmt_train.strategy.plan import EVERY_STEP, LOCAL_STEPS


@dataclass(frozen=True)
class Alone:
    """One rank. Several ranks use a server instead."""


@dataclass(frozen=True)
class Replicas:
    """Every rank has all parameters; see `ReplicasPlan`."""

    reducer: str = "all-reduce"
    cadence: str = EVERY_STEP
    codec: str = "dense"


@dataclass(frozen=True)
class Server:
    """A sharded parameter server; see `ServerPlan`. optimizer: who turns gradients into updates, worker or shard."""

    cadence: str = EVERY_STEP
    up: str = "dense"
    down: str = "dense"
    optimizer: str = "shard"


@dataclass(frozen=True)
class Peers:
    """Workers send changes to all others."""

    up: str


@dataclass(frozen=True)
class Mode:
    """One row of the table: a name for a family of strategies with these settings.

    source: the paper. nodes: maximum number of machines (0: no limit). settings: values of the keys that the configuration
    leaves to the mode, as in {"local.every": 10}.
    """

    family: Alone | Replicas | Server | Peers
    source: str
    nodes: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)


# The thesis's own sparse algorithms: the optimizer at the shards, 99.9% dropped both ways, but nothing inside a machine,
# deltas that include the worker's own updates, and none of our rules for asynchronous workers.
_AS_THE_THESIS = {
    "dropping.up": 0.999, "dropping.down": 0.999, "server.bypass": "node", "server.one_node_at_a_time": True,
    "optimizer.async_beta1": "unchanged", "optimizer.async_warmup": "unchanged",
}  # fmt: skip
MODES = {
    "single": Mode(Alone(), "thesis 3.1, 3.5", nodes=1),
    "vanilla": Mode(Server(), "thesis 3.3, 3.6"),
    "overlap": Mode(Server("overlapped"), "thesis 3.4, 3.7"),
    "sparse": Mode(Server(EVERY_STEP, "top-k", "top-k", optimizer="worker"), "after the thesis, 3.8"),
    "sparse-overlap": Mode(Server("overlapped", "top-k", "top-k", optimizer="worker"), "after the thesis, 4.2.5"),
    "thesis-sparse": Mode(Server(EVERY_STEP, "top-k", "top-k"), "thesis 3.8, Algorithms 8 and 9", settings=_AS_THE_THESIS),
    "thesis-sparse-overlap": Mode(Server("overlapped", "top-k", "top-k"), "thesis 4.2.5",
                                  settings={**_AS_THE_THESIS, "overlap.local_update": "none"}),
    "staleness-aware": Mode(Server(), "Zhang 2016", settings={"server.rule": "staleness-aware"}),
    "softsync": Mode(Server(), "Zhang 2016", settings={"server.rule": "softsync"}),
    "backup": Mode(Server(), "Chen 2016", settings={"server.rule": "rounds", "server.backup": 1}),
    "downpour": Mode(Server("downpour"), "Dean 2012, Farrell & Yang 2016",
                     settings={"server.shards": 1, "optimizer.name": "adagrad"}),
    "easgd": Mode(Server(LOCAL_STEPS), "Zhang 2015", settings={"local.outer": "elastic", "local.every": 10}),
    "strom": Mode(Peers("threshold"), "Strom 2015, 2.6"),
    "sync": Mode(Replicas(), "Arnold 2016, Algorithm 1"),
    "powersgd": Mode(Replicas("powersgd"), "Vogels 2019"),
    "low-bit": Mode(Replicas("low-bit"), "Zheng 2019, Algorithm 2",
                    settings={"replicas.buckets": 12, "replicas.late_lookups": True}),
    "pipe": Mode(Replicas("all-reduce", "pipelined", "half"), "Pipe-SGD, Algorithm 1"),
    "local-sgd": Mode(Replicas("all-reduce", LOCAL_STEPS), "Stich 2019"),
    "simuparallel": Mode(Replicas("all-reduce", LOCAL_STEPS), "thesis 2.3.1", settings={"local.every": 0}),
    "diloco": Mode(Replicas("all-reduce", LOCAL_STEPS, "half"), "DiLoCo", settings={"local.outer": "nesterov"}),
    "diloco-async": Mode(Server(LOCAL_STEPS, "half", "half"), "Async Local-SGD, Algorithm 3",
                         settings={"local.outer": "nesterov"}),
    "sparse-local": Mode(Replicas("all-gather", LOCAL_STEPS, "tile-top-k"), "after SparseLoCo",
                         settings={"local.every": 2, "local.delay": 2, "local.outer": "sum"}),
    "sparse-local-async": Mode(Server(LOCAL_STEPS, "top-k", "top-k"), "SparseLoCo, thesis 4.2.5",
                               settings={"local.every": 1, "local.delay": 64}),
}  # fmt: skip
