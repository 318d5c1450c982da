"""nmt-train: train a model, or continue a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from nmt_train import cli, config, launch
from nmt_train.errors import UserError


def parser() -> cli.Parser:
    """One option per configuration key, named by its dotted path."""
    described = "Train a translation model; the same command continues a run that was interrupted."
    options = cli.Parser(prog="nmt-train", allow_abbrev=False, description=described)
    options.add_argument("--config", action="append", default=[], metavar="FILE", help="YAML file; later ones override")
    options.add_argument("--print-config", action="store_true", help="print the whole resolved configuration and exit")
    options.add_argument("--force", action="store_true", help="continue a run although its configuration changed")
    options.add_argument("--overwrite", action="store_true", help="forget what the run folder holds and start anew")
    options.add_argument("--debug", action="store_true", help="show the stack of an error")
    group = options.add_argument_group("run")
    for key in config.entries():
        if isinstance(key, str):
            name, _, description = key.partition(": ")
            group = options.add_argument_group(name, description.replace("%", "%%"))
            continue
        default = "required" if key.required else f"default: {config.shown(key.default)}"
        text = f"{key.description} ({default})".replace("%", "%%")
        const = {"nargs": "?", "const": "true"} if key.type == "<class 'bool'>" else {}
        group.add_argument(f"--{key.name}", dest=key.name, metavar="X", help=text, **const)  # type: ignore[arg-type]
    return options


def command(arguments: Sequence[str]) -> int:
    given, rest = parser().parse_known_args(arguments)
    if rest:
        stray = rest[0].split("=")[0]
        if stray.startswith("--"):
            raise UserError(f"command line: {config.unknown(stray.removeprefix('--'))}")
        raise UserError(f"command line: {stray!r} belongs to no option; a list is written as one word: '[a, b]'")
    overrides = {name: text for name, text in vars(given).items() if name in config.leaves() and text is not None}
    try:
        resolved = config.load(given.config, overrides)
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
