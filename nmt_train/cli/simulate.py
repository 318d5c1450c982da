"""nmt-simulate: train on a simulated cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nmt_train import cli
from nmt_train.cli import options as settings
from nmt_train.common import launcher
from nmt_train.common.errors import UserError
from nmt_train.common.paths import expanded
from nmt_train.common.streams import tell
from nmt_train.launch.restarts import read_hosts, run_once
from nmt_train.simulation import cluster_file

_CLUSTER = "cluster."
_FOLDER = "-simulated"
_EXAMPLES = """
  nmt-simulate --config mine.yml --model.preset base --cluster configs/clusters/gpu-4x1-1gbit.yml --mode sparse-local
  nmt-simulate --config mine.yml --cluster my-cluster.yml --cluster.network.bandwidth '100 Mbit/s'
  nmt-simulate --config mine.yml --cluster my-cluster.yml --timing-only 50      # words/s, without training
  nmt-simulate --config mine.yml --measure --hosts hosts > my-cluster.yml       # measure your machines
  nmt-simulate --config mine.yml --cluster my-cluster.yml --compare             # which mode to use there
  nmt-simulate --config mine.yml --measure > device.yml                         # measure this machine's device
"""


def parser() -> cli.Parser:
    options = settings.parser(
        "nmt-simulate",
        "Train on a simulated cluster, to see how long training would take there and what the model would learn. Without --run,"
        f" the run folder is the one in the configuration with {_FOLDER} appended.",
        _EXAMPLES,
    )
    group = options.add_argument_group("simulation")
    group.add_argument(
        "--cluster", type=expanded, metavar="FILE", help="YAML: machines, devices, network; see configs/clusters"
    )
    group.add_argument("--shuffle-seed", type=cli.count, metavar="N", help="delay messages randomly, to test other orders")
    group.add_argument(
        "--timing-only", type=cli.positive, metavar="N", help="simulate only the timing of N steps of every rank"
    )
    group.add_argument(
        "--measure",
        action="store_true",
        help="measure the devices and the network of all machines, under mpirun or with --hosts, and print a cluster file; or"
        " only this machine's device, and print a file for the key `profile` of cluster files",
    )
    group.add_argument(
        "--hosts", type=expanded, metavar="FILE", help="--measure: start a rank on each slot of this hostfile: NAME slots=RANKS"
    )
    group.add_argument(
        "--compare",
        action="store_true",
        help="estimate for every mode, on 1, 2, 4, ... and all machines, how many times sooner than one machine it learns the"
        " same model; write compare.json and compare.png to the run folder",
    )
    group.add_argument(
        "--steps",
        type=cli.positive,
        metavar="N",
        help="--measure: number of steps for each kind of work (default: 20, or fewer if they take long)",
    )
    changes = options.add_argument_group("cluster", "Replace values of the cluster file.")
    for name, description in cluster_file.entries():
        changes.add_argument(f"--{_CLUSTER}{name}", metavar="X", help=description)
    settings.add_keys(options)
    return options


def command(arguments: Sequence[str]) -> int:
    options = parser()
    if not arguments:
        tell(settings.short_help(options))
        return UserError.status
    given = settings.parse(options, arguments)
    resolved = settings.resolve(given)
    if vars(given)["run"] is None:  # a simulation never shares a folder with a real run
        resolved = dataclasses.replace(resolved, run=resolved.run.rstrip("/") + _FOLDER)
    if given.print_config:
        settings.print_config(resolved)
        return 0
    launcher.refuse_torchrun()
    settings.keep_files(given, resolved)
    if (given.cluster is not None) == given.measure:
        options.error("give either --cluster (one of configs/clusters, or your own) or --measure")
    if given.hosts is not None and not given.measure:
        options.error("--hosts belongs to --measure")
    if given.steps is not None and given.cluster is not None:
        options.error("--steps belongs to --measure; with --cluster, give --timing-only N")
    changes = {name.removeprefix(_CLUSTER): text for name, text in vars(given).items() if name.startswith(_CLUSTER)}
    changes = {name: text for name, text in changes.items() if text is not None}
    if given.cluster is None:
        needs = {"timing-only": given.timing_only is not None, "compare": given.compare}
        needs |= {f"{_CLUSTER}{name}": True for name in changes}
        for name in (name for name, wanted in needs.items() if wanted):
            options.error(f"--{name} belongs to --cluster")
    if given.timing_only is not None and given.compare:
        options.error("give only one of --timing-only and --compare")
    trains = given.cluster is not None and given.timing_only is None and not given.compare
    for name in ("shuffle_seed", "overwrite", "force"):
        if getattr(given, name) not in (None, False) and not trains:
            options.error(f"--{name.replace('_', '-')} belongs to simulated training; remove it")
    if given.measure and given.hosts is not None and not launcher.launched():
        return run_once(read_hosts(given.hosts), arguments, "nmt_train.cli.simulate")
    from nmt_train.simulation.simulate import advise, measure_machines, simulate, time_only

    if given.measure:
        return measure_machines(resolved, given.steps)
    simulated = cluster_file.load(given.cluster, changes)
    if given.compare:
        advise(resolved, simulated)
        return 0
    if given.timing_only is not None:
        time_only(resolved, simulated, given.timing_only)
        return 0
    return simulate(resolved, simulated, given.force, given.overwrite, given.shuffle_seed)


def main() -> None:
    cli.run_rank(command)


if __name__ == "__main__":
    main()
