"""nmt-train: train a model, or continue a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from nmt_train import cli, config, launch
from nmt_train.cli import settings
from nmt_train.errors import UserError


def parser() -> cli.Parser:
    options = settings.parser("nmt-train", "Train a translation model; the same command continues a run that was interrupted.")
    settings.add_keys(options)
    return options


def command(arguments: Sequence[str]) -> int:
    given = settings.parse(parser(), arguments)
    try:
        resolved = settings.resolve(given)
        if given.print_config:
            print(config.to_yaml(resolved), end="")
            return 0
        from nmt_train.start import check, start  # brings torch's heavier parts, which --help can do without

        check(resolved)
    except UserError:
        if launch.launched() and launch.local_rank():
            return 2  # the machine's first rank says it
        raise
    return start(resolved, given.force, given.overwrite, list(arguments))


def main() -> None:
    status = cli.run(command)
    if launch.launched():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # MPI's threads would not let go of a rank that leaves without the others
    sys.exit(status)


if __name__ == "__main__":
    main()
