"""The options that all training commands share: one option per configuration key, named by the key's dotted path."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from nmt_train import cli, config
from nmt_train.common.errors import UserError
from nmt_train.common.section import listed
from nmt_train.config import Config
from nmt_train.modes.table import MODES


def parser(prog: str, description: str) -> cli.Parser:
    options = cli.Parser(prog=prog, allow_abbrev=False, description=description)
    options.add_argument(
        "--config", action="append", default=[], metavar="FILE", help="YAML file; may be repeated: later files win"
    )
    options.add_argument("--print-config", action="store_true", help="print the whole resolved configuration and exit")
    options.add_argument("--force", action="store_true", help="continue a run even if its configuration has changed")
    options.add_argument("--overwrite", action="store_true", help="delete the contents of the run folder and start over")
    options.add_argument("--debug", action="store_true", help="print the stack trace of an error")
    return options


def add_keys(options: cli.Parser) -> None:
    """Add one option per configuration key; call this after adding the command's own options."""
    group = options.add_argument_group("run")
    for key in config.entries():
        if isinstance(key, str):
            name, _, description = key.partition(": ")
            group = options.add_argument_group(name, description.replace("%", "%%"))
            continue
        default = "required" if key.required else f"default: {config.shown(key.default)}"
        names = f": {listed(MODES)}" if key.name == "mode" else ""
        text = f"{key.description}{names} ({default})".replace("%", "%%")
        const = {"nargs": "?", "const": "true"} if key.type == "<class 'bool'>" else {}
        group.add_argument(f"--{key.name}", dest=key.name, metavar="X", help=text, **const)  # type: ignore[arg-type]


def parse(options: cli.Parser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments; for an unknown option, raise a UserError that names the option and the nearest key."""
    given, rest = options.parse_known_args(arguments)
    if rest:
        stray = rest[0].split("=")[0]
        if stray.startswith("--"):
            known = [name.removeprefix("--") for action in options._actions for name in action.option_strings]
            raise UserError(f"command line: {config.unknown(stray.removeprefix('--'), known)}")
        raise UserError(f"command line: {stray!r} belongs to no option; quote a list: '[a, b]'")
    return given


def resolve(given: argparse.Namespace) -> Config:
    """Combine the defaults, the configuration files and the command-line options."""
    overrides = {name: text for name, text in vars(given).items() if name in config.leaves() and text is not None}
    return config.load(given.config, overrides)
