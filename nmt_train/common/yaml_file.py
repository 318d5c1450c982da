"""YAML files of keys: scalars as they are written, and for every key the line that gave it, for messages."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from nmt_train.common.errors import UserError, unreadable

_LONGEST, _MOST = 1 << 20, 100_000  # bytes, entries


class Loader(yaml.SafeLoader):
    """Scalars stay as they are written, but for null: their types are the keys', not YAML's, which makes `1.10` a number,
    `no` a truth value and `2026-01-01` a date."""


Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag == "tag:yaml.org,2002:null"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class TooMuch(ValueError):
    """A text holds more than anybody writes; the message says what."""


def value(text: str) -> Any:
    """What a text holds; TooMuch if that would fill the memory, YAMLError or ValueError if it is not YAML."""
    if len(text) > _LONGEST:
        raise TooMuch(f"has more than {_LONGEST:,} characters")
    try:
        if next(islice(_nodes(yaml.compose(text, Loader)), _MOST, None), None) is not None:
            raise TooMuch(f"has more than {_MOST:,} entries, those counted that `*` repeats")
        return yaml.load(text, Loader)
    except RecursionError:
        raise TooMuch("is nested too deeply, or in itself") from None


def read(path: Path, where: dict[str, str], hint: str) -> dict[str, Any]:
    """A file's keys and values; `where` gets the file and line of every dotted key, `hint` says what to do without a file.

    UserError for what is not such a file.
    """
    try:
        if path.stat().st_size > _LONGEST:
            raise UserError(f"{path}: has more than {_LONGEST:,} bytes; is this a file of keys?")
        text = path.read_text(encoding="utf-8")
        values = value(text)
        _locate(yaml.compose(text, Loader), path, "", where)
    except OSError as error:
        raise UserError(f"{unreadable(path, error)}; {hint}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8; save the file as UTF-8") from None
    except TooMuch as error:
        raise UserError(f"{path}: {error}; write the keys that nmt-train --help lists") from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}{line}: not YAML: {getattr(error, 'problem', None) or error}; correct the line") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds no keys; write `key: value` lines")
    return values


def override(values: dict[str, Any], texts: Mapping[str, str], where: dict[str, str]) -> None:
    """Put values from the command line (dotted key to YAML text) in the place of those of files."""
    for name, text in texts.items():
        *sections, key = name.split(".")
        place = values
        for section in sections:
            if not isinstance(place.get(section), dict):
                place[section] = {}
            place = place[section]
        try:
            place[key] = value(text)
        except TooMuch as error:
            raise UserError(f"command line: {name}: {error}; write the value that nmt-train --help describes") from None
        except (yaml.YAMLError, ValueError):
            place[key] = text
        where[name] = "command line"


def merge(into: dict[str, Any], values: Mapping[str, Any], whole: Container[str], prefix: str = "") -> None:
    """Later values beside and over earlier ones, key by key; those of the dotted keys in `whole` are replaced, mappings too."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and isinstance(into.get(key), dict) and name not in whole:
            merge(into[key], value, whole, f"{name}.")
        else:
            into[key] = value


def _nodes(node: Any) -> Iterator[Any]:
    """All that a file holds, as often as it is repeated."""
    yield node
    for inner in getattr(node, "value", ()) if not isinstance(node, yaml.ScalarNode) else ():
        for each in inner if isinstance(inner, tuple) else (inner,):
            yield from _nodes(each)


def _locate(node: Any, path: Path, prefix: str, where: dict[str, str]) -> None:
    """Remember each key's file and line; refuse one given twice, which YAML itself lets pass."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        place = f"{path}, line {key.start_mark.line + 1}"
        if "." in str(key.value):
            *outer, inner = name.split(".")
            raise UserError(f"{place}: {name}: in a file keys are nested, not dotted: write `{inner}:` below `{outer[-1]}:`")
        if name in seen:
            raise UserError(f"{place}: {name} is given twice; remove one")
        seen.add(name)
        where[name] = place
        _locate(value, path, f"{name}.", where)
