"""The table of modes. A new mode is a new row.

Sparse modes run the optimizer at the worker. A shard receives only a hundredth of a gradient at a time, so Adam's averages
there would get too little data. In these modes, workers therefore compute updates from their dense gradients, and the codec
drops elements of the updates (docs/lab-notebook.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Mode:
    """One row of the table: the names of a schedule, an exchange and the codecs of both directions.

    up, down: the codecs of workers and of shards. source: the paper. optimizer: which of them turns gradients into updates,
    worker or shard. nodes: maximum number of machines (0: no limit). settings: values of the keys that the configuration leaves
    to the mode, as in {"local.every": 10}.
    """

    schedule: str
    exchange: str
    up: str
    down: str
    source: str
    optimizer: str = "shard"
    nodes: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)


# The thesis's own sparse algorithms: the optimizer at the shards, 99.9% dropped both ways, deltas that include the worker's own
# updates, and none of our rules for asynchronous workers.
_AS_THE_THESIS = {
    "dropping.up": 0.999, "dropping.down": 0.999, "server.one_node_at_a_time": True, "overlap.local_update": "none",
    "optimizer.async_beta1": "unchanged", "optimizer.async_warmup": "unchanged",
}  # fmt: skip
MODES = {
    "single": Mode("every-step", "alone", "dense", "dense", "thesis 3.1, 3.5", nodes=1),
    "vanilla": Mode("every-step", "server", "dense", "dense", "thesis 3.3, 3.6"),
    "overlap": Mode("overlapped", "server", "dense", "dense", "thesis 3.4, 3.7"),
    "sparse": Mode("every-step", "server", "top-k", "top-k", "after the thesis, 3.8", optimizer="worker"),
    "sparse-overlap": Mode("overlapped", "server", "top-k", "top-k", "after the thesis, 4.2.5", optimizer="worker"),
    "thesis-sparse": Mode("every-step", "server", "top-k", "top-k", "thesis 3.8, Algorithms 8 and 9", settings=_AS_THE_THESIS),
    "thesis-sparse-overlap": Mode("overlapped", "server", "top-k", "top-k", "thesis 4.2.5", settings=_AS_THE_THESIS),
    "staleness-aware": Mode("every-step", "server", "dense", "dense", "Zhang 2016",
                            settings={"server.rule": "staleness-aware"}),
    "softsync": Mode("every-step", "server", "dense", "dense", "Zhang 2016", settings={"server.rule": "softsync"}),
    "backup": Mode("every-step", "server", "dense", "dense", "Chen 2016",
                   settings={"server.rule": "rounds", "server.backup": 1}),
    "downpour": Mode("downpour", "server", "dense", "dense", "Dean 2012, Farrell & Yang 2016",
                     settings={"server.shards": 1, "optimizer.name": "adagrad"}),
    "easgd": Mode("local-steps", "server", "dense", "dense", "Zhang 2015", optimizer="worker",
                  settings={"local.outer": "elastic", "local.every": 10}),
    "strom": Mode("every-step", "peers", "threshold", "threshold", "Strom 2015, 2.6", optimizer="worker"),
    "sync": Mode("every-step", "all-reduce", "dense", "dense", "Arnold 2016, Algorithm 1"),
    "powersgd": Mode("every-step", "powersgd", "dense", "dense", "Vogels 2019"),
    "low-bit": Mode("every-step", "low-bit", "dense", "dense", "Zheng 2019, Algorithm 2"),
    "pipe": Mode("pipelined", "all-reduce", "half", "half", "Pipe-SGD, Algorithm 1"),
    "local-sgd": Mode("local-steps", "all-reduce", "dense", "dense", "Stich 2019", optimizer="worker"),
    "simuparallel": Mode("local-steps", "all-reduce", "dense", "dense", "thesis 2.3.1", optimizer="worker",
                         settings={"local.every": 0}),
    "diloco": Mode("local-steps", "all-reduce", "half", "half", "DiLoCo", optimizer="worker",
                   settings={"local.outer": "nesterov"}),
    "diloco-async": Mode("local-steps", "server", "half", "half", "Async Local-SGD, Algorithm 3", optimizer="worker",
                         settings={"local.outer": "nesterov"}),
    "sparse-local": Mode("local-steps", "all-gather", "tile-top-k", "tile-top-k", "after SparseLoCo", optimizer="worker",
                         settings={"local.every": 2, "local.delay": 2, "local.outer": "sum"}),
    "sparse-local-async": Mode("local-steps", "server", "top-k", "top-k", "SparseLoCo, thesis 4.2.5", optimizer="worker",
                               settings={"local.every": 1, "local.delay": 64}),
}  # fmt: skip
