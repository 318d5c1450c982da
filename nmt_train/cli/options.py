"""The options that all training commands share: one option per configuration key, named by the key's dotted path."""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nmt_train import cli, config, config_text
from nmt_train.common.errors import UserError
from nmt_train.common.paths import expanded
from nmt_train.common.unknown_key import unknown
from nmt_train.config import Config, Key
from nmt_train.model import PRESETS
from nmt_train.modes import resolve as modes
from nmt_train.modes.auto import AUTO
from nmt_train.modes.table import MODES


class _Formatter(argparse.HelpFormatter):
    """Wraps lines, except lines that begin with spaces, such as those of examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(
            line if line.startswith(" ") else super(_Formatter, self)._fill_text(line, width, indent)
            for line in text.splitlines()
        )


# What a new user needs.
_FIRST = (
    "run", "corpus.train", "corpus.valid", "corpus.vocabulary.size", "model.preset", "batch.tokens", "stop.after", "devices",
    "mode",
)  # fmt: skip


class _Help(argparse.Action):
    """`--help`: an overview; `--help NAME`: an option, a key, or the keys of a section; `--help all`: everything."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None) -> None:
        texts = {None: _overview, "all": argparse.ArgumentParser.format_help}
        print(texts[values](parser) if values in texts else explained(parser, values), end="")
        parser.exit()


def _overview(parser: argparse.ArgumentParser) -> str:
    """The options of the command, the first keys, and the names of the sections of the others."""
    formatter = parser._get_formatter()
    formatter.add_usage(parser.usage, [], [])
    formatter.add_text(parser.description)
    actions = [action for action in parser._actions if action.option_strings and action.dest not in config.leaves()]
    first = [action for name in _FIRST for action in parser._actions if action.dest == name]
    for title, its in (("options", actions), ("the first keys of a configuration", first)):
        formatter.start_section(title)
        formatter.add_arguments(its)
        formatter.end_section()
    formatter.start_section("sections (--help SECTION explains their keys; --help all explains everything)")
    formatter.add_text("\n".join(f"  {name:18}  {about}" for name, about in _sections()))
    formatter.end_section()
    return formatter.format_help()


def _sections() -> Iterator[tuple[str, str]]:
    """Names of sections, and the first sentence about each."""
    for key in config.entries():
        if isinstance(key, str):
            name, _, about = key.partition(": ")
            yield name, re.split(r"[.;](?=\s|$)|\s\(", about)[0]


class _Several(argparse.Action):
    """The value of a list as YAML: either one word, which is YAML already, or several words, as in --corpus.train a b."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, values[0] if len(values) == 1 else json.dumps(values))


def parser(prog: str, description: str, examples: str) -> cli.Parser:
    """A parser with the options that all training commands share; `add_keys` adds those for keys. examples: indented lines."""
    options = cli.Parser(
        prog=prog, add_help=False, usage=f"{prog} --config FILE [--KEY VALUE ...] [options]",
        description=f"{description}\n{examples}", formatter_class=_Formatter,
    )  # fmt: skip
    options.add_argument(
        "-h",
        "--help",
        nargs="?",
        action=_Help,
        metavar="NAME",
        help="an overview; or explain one option, key or section, or all",
    )
    options.add_argument(
        "--config", action="append", default=[], metavar="FILE", help="YAML file; may be repeated: later files win"
    )
    options.add_argument("--print-config", action="store_true", help="print what you, the mode and the defaults choose")
    options.add_argument("--force", action="store_true", help="resume a run even if its configuration has changed")
    options.add_argument(
        "--overwrite", action="store_true", help="delete what a run has written in the run folder, and start over"
    )
    options.add_argument("--debug", action="store_true", help="print the stack trace of an error")
    return options


def short_help(options: cli.Parser) -> str:
    """What a command prints if it is called without arguments."""
    more = f"{options.prog} --help has an overview; {options.prog} --help NAME explains one option, key or section."
    return f"usage: {options.usage}\n{options.description}\n{more}"


def add_keys(options: cli.Parser) -> None:
    """Add one option per configuration key; call this after adding the command's own options."""
    group = options.add_argument_group("run")
    for key in config.entries():
        if isinstance(key, str):
            name, _, description = key.partition(": ")
            group = options.add_argument_group(name, description.replace("%", "%%"))
            continue
        values: dict[str, Any] = {"nargs": "?", "const": "true"} if key.type == "<class 'bool'>" else {}
        if "list[" in key.type:
            values = {"nargs": "+", "action": _Several}
        text = _described(key).replace("%", "%%")
        group.add_argument(f"--{key.name}", dest=key.name, metavar="X", help=text, **values)


def _described(key: Key) -> str:
    names = f". {_modes()}" if key.name == "mode" else ""
    default = f"default: {config_text.shown(key.default)}"
    if key.name.removeprefix("model.") in PRESETS["small"]:
        default = "default: as in model.preset"
    return f"{key.description}{names} ({'required' if key.required else default})"


def _modes() -> str:
    """All modes, by what they are for."""
    recommended = ("sync", "low-bit", "sparse-overlap", "sparse-local", "sparse-local-async")
    thesis = [name for name, mode in MODES.items() if mode.source.startswith("thesis")]
    papers = [name for name in MODES if name not in (*recommended, *thesis)]
    groups = {"recommended": recommended, "of the thesis": thesis, "of papers, and others": papers}
    return "; ".join(f"{title}: {', '.join(names)}" for title, names in groups.items())


def explained(parser: argparse.ArgumentParser, name: str) -> str:
    """The explanation of an option, or of all keys of a section; UserError if there is none of this name."""
    name = name.removeprefix("--")
    texts = {
        option.removeprefix("--"): str(action.help) for action in parser._actions for option in action.option_strings
    }  # a key of the configuration is an option, too
    found = {option: text for option, text in texts.items() if option == name or option.startswith(f"{name}.")}
    if not found:
        raise UserError(f"--help: {unknown(name, config.leaves(), texts)}")
    lines = (f"{option}: {text.replace('%%', '%')}" for option, text in found.items())
    return "".join(textwrap.fill(line, 100, subsequent_indent="    ") + "\n" for line in lines)


def print_config(resolved: Config) -> None:
    """Print the configuration by who chooses its values. Raises UserError if it cannot be used in its mode."""
    reasons: Mapping[str, str] = {}
    if resolved.mode not in (None, AUTO):  # otherwise, the ranks decide
        modes.resolve(resolved)
        nodes = (0,) if MODES[str(resolved.mode)].nodes == 1 else (0, 1)
        reasons = modes.resolve(modes.fit(resolved, nodes), nodes).reasons
    print(config_text.by_origin(resolved, reasons), end="")


def parse(options: cli.Parser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments; for an unknown option, raise a UserError that names the option and the nearest key."""
    given, rest = options.parse_known_args(arguments)
    if rest:
        stray = rest[0].split("=")[0]
        if stray.startswith("--"):
            known = [name.removeprefix("--") for action in options._actions for name in action.option_strings]
            raise UserError(f"command line: {unknown(stray.removeprefix('--'), config.leaves(), known)}")
        raise UserError(f"command line: {stray!r} belongs to no option; quote a list: '[a, b]'")
    return given


def resolve(given: argparse.Namespace) -> Config:
    """Combine the defaults, the configuration files and the command-line options."""
    known = config.leaves()
    overrides = {name: text for name, text in vars(given).items() if name in known and text is not None}
    return config.load(given.config, overrides)


def keep_files(given: argparse.Namespace, resolved: Config) -> None:
    """Raise UserError if the config.yml that a new run writes would replace a file of the user's."""
    folder = expanded(resolved.run)
    written = folder / "config.yml"
    if written.exists() and not (folder / "vocabulary.model").exists():  # no run has begun there
        for file in given.config:
            if expanded(file).samefile(written):
                raise UserError(
                    f"{file}: the run would write its own config.yml over it; move it, or choose another run folder"
                )
