"""A script for bash and zsh that completes the commands' options, the keys of a configuration and their values.

It is written once, because a command that the shell started for every completion would spend seconds on its imports.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator

from nmt_train import config
from nmt_train.cli import Parser, export, import_model, plot, simulate, translate, validate
from nmt_train.modes.auto import AUTO
from nmt_train.modes.table import MODES

_OTHERS = (simulate, translate, validate, plot, export, import_model)  # commands without nmt-train
_KEYS = config.leaves()


def script(train: Parser) -> str:
    """train: the parser of nmt-train."""
    parsers = [train, *(command.parser() for command in _OTHERS)]
    cases = "".join(f"        {case}) {answer} ;;\n" for parser in parsers for case, answer in _cases(parser))
    return f"""\
[ -n "${{ZSH_VERSION-}}" ] && autoload -U compinit bashcompinit && compinit && bashcompinit
_nmt_train() {{
    local words=
    case "${{1##*/}} ${{3##*/}}" in
{cases}    esac
    COMPREPLY=($(compgen -W "$words" -- "$2"))
}}
complete -o default -F _nmt_train {" ".join(parser.prog for parser in parsers)}
"""


def _cases(parser: Parser) -> Iterator[tuple[str, str]]:
    """For a command and the word before the one to complete, where the words come from; the first case that fits counts."""
    options, pending = set(), [*parser._actions]
    for action in pending:
        if isinstance(action, argparse._SubParsersAction):
            own = [option for each in parser._actions for option in each.option_strings]
            yield f'"{parser.prog} {parser.prog}"', _words([*action.choices, *own])
            pending += [each for kind in action.choices.values() for each in kind._actions]
        elif values := _values(action):
            yield " | ".join(f'"{parser.prog} {option}"' for option in action.option_strings), _words(values)
        options |= set(action.option_strings)
    yield f'"{parser.prog} "*', f"[[ $2 == -* ]] && {_words(sorted(options))}"  # else files


def _values(action: argparse.Action) -> list[str]:
    """The values of an option, if they have names."""
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    if action.dest == "mode":
        return [AUTO, *MODES]
    key = _KEYS.get(action.dest)
    return re.findall(r"'([\w-]+)'", key.type) if key is not None and "Literal" in key.type else []


def _words(words: Iterable[str]) -> str:
    return f'words="{" ".join(words)}"'
