"""Train on a simulated cluster: the code of `nmt-train`, every rank of it in this process, on a virtual clock."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch

from nmt_train import device, modes
from nmt_train.begin import follow, lead, opened
from nmt_train.cluster import ClusterConfig
from nmt_train.config import Config
from nmt_train.model.transformer import Transformer
from nmt_train.wire.network import Network
from nmt_train.wire.virtual import Engine, VirtualWire


def simulate(config: Config, cluster: ClusterConfig, force: bool, overwrite: bool, shuffle_seed: int | None = None) -> int:
    """Train as `config` says and as if on `cluster`; the exit status, as of training.

    shuffle_seed: hold messages back at random, to try other orders of delivery. UserError for all that a user can mend.
    """
    modes.check(config, cluster.ranks())
    own = device.prepare(config.devices, config.threads)
    start = time.perf_counter()
    with opened(config, force, overwrite) as ready:
        with torch.device("meta"):
            elements = sum(part.numel() for part in Transformer(config.model, len(ready.vocabulary)).parameters())
        engine = Engine(Network(cluster, elements, config.wire.deadline, shuffle_seed))

        def main(wire: VirtualWire) -> Callable[[], int]:
            def run() -> int:
                if wire.rank == 0:
                    status = lead(config, wire, own, ready)
                else:
                    status = follow(config, wire, own, ready.vocabulary, ready.store, lambda ask: nullcontext())
                wire.close()
                return status

            return run

        statuses = engine.run([main(wire) for wire in engine.wires])
    seconds = time.perf_counter() - start
    print(f"simulated {engine.wires[0].now():.1f} s of {len(statuses)} ranks in {seconds:.1f} s", file=sys.stderr)
    return int(max(statuses))
