"""nmt-train: train a model, or continue a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from nmt_train import cli, config
from nmt_train.cli import options as settings
from nmt_train.common import launcher
from nmt_train.common.errors import UserError
from nmt_train.training.launch.restarts import Job, read_hosts


def parser() -> cli.Parser:
    options = settings.parser("nmt-train", "Train a translation model; the same command continues a run that was interrupted.")
    options.add_argument(
        "--hosts", type=Path, metavar="FILE", help="start ranks on the machines in this hostfile: lines of NAME slots=RANKS"
    )
    options.add_argument(
        "--restarts", type=cli.count, default=0, metavar="N",
        help="if the job fails, restart it up to N times, on the machines that then answer (default: 0)",
    )  # fmt: skip
    settings.add_keys(options)
    return options


def command(arguments: Sequence[str]) -> int:
    given = settings.parse(parser(), arguments)
    try:
        resolved = settings.resolve(given)
        if given.print_config:
            print(config.to_yaml(resolved), end="")
            return 0
        from nmt_train.training.start import check, start  # imports the slow parts of torch, which --help does not need

        hosts = read_hosts(given.hosts) if given.hosts and not launcher.launched() else []
        check(resolved, hosts)
    except UserError:
        if launcher.launched() and launcher.local_rank():
            return 2  # the first rank of the machine prints the error
        raise
    overwrite = given.overwrite and not launcher.queued_again()  # after a requeue, keep what the job has written
    return start(resolved, given.force, overwrite, Job(hosts, given.restarts, arguments))


def main() -> None:
    status = cli.run(command)
    if launcher.launched():
        from nmt_train.distributed.transport.mpi.library import leave

        sys.stdout.flush()
        sys.stderr.flush()
        leave(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
