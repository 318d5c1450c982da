"""nmt-simulate: train on a cluster that is only simulated."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from nmt_train import cli, cluster, config
from nmt_train.cli import settings


def parser() -> cli.Parser:
    options = settings.parser(
        "nmt-simulate", "Train on a simulated cluster: how long would it take there, and what would it learn by then?"
    )
    group = options.add_argument_group("simulation")
    group.add_argument("--cluster", type=Path, metavar="FILE", help="YAML: machines, devices, network; see configs/clusters")
    group.add_argument("--shuffle-seed", type=int, metavar="N", help="hold messages back at random, to try other orders")
    settings.add_keys(options)
    return options


def command(arguments: Sequence[str]) -> int:
    options = parser()
    given = settings.parse(options, arguments)
    resolved = settings.resolve(given)
    if given.print_config:
        print(config.to_yaml(resolved), end="")
        return 0
    if given.cluster is None:
        options.error("--cluster is missing; give one of configs/clusters, or your own")
    simulated = cluster.load(given.cluster)
    from nmt_train.simulate import simulate

    return simulate(resolved, simulated, given.force, given.overwrite, given.shuffle_seed)


def main() -> None:
    sys.exit(cli.run(command))
