"""Read YAML configuration files: scalars stay text, and error messages name the line that set a key."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from nmt_train.common.errors import UserError, unreadable

_LONGEST, _MOST = 1 << 20, 100_000  # bytes, entries

COMMAND_LINE = "command line"  # the place of a value that no file sets


class Loader(yaml.SafeLoader):
    """A loader that keeps every scalar except null as text; the configuration key determines the type.

    YAML itself would read `1.10` as a number, `no` as a boolean and `2026-01-01` as a date.
    """


Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag == "tag:yaml.org,2002:null"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class TooMuch(ValueError):
    """A text is larger or more deeply nested than any real configuration; the message says how."""


def value(text: str) -> Any:
    """Parse a YAML text; raise TooMuch if its value would fill the memory, YAMLError or ValueError if it is not YAML."""
    if len(text) > _LONGEST:
        raise TooMuch(f"has more than {_LONGEST:,} characters")
    try:
        if next(islice(_nodes(yaml.compose(text, Loader)), _MOST, None), None) is not None:
            raise TooMuch(f"has more than {_MOST:,} entries, counting those that aliases (`*`) repeat")
        return yaml.load(text, Loader)
    except RecursionError:
        raise TooMuch("is nested too deeply, or contains itself") from None


def read(path: Path, where: dict[str, str], hint: str) -> dict[str, Any]:
    """Return a file's keys and values.

    where: receives the file and line of every dotted key. hint: says what to do if the file cannot be read. Raises UserError
    if the file is not a valid file of keys.
    """
    try:
        if path.stat().st_size > _LONGEST:
            raise UserError(f"{path}: has more than {_LONGEST:,} bytes; give a configuration file")
        text = path.read_text(encoding="utf-8")
        values = value(text)
        _locate(yaml.compose(text, Loader), path, "", where)
    except OSError as error:
        raise UserError(f"{unreadable(path, error)}; {hint}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8; save the file as UTF-8") from None
    except TooMuch as error:
        raise UserError(f"{path}: {error}; use only the keys that --help lists") from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}{line}: not YAML: {getattr(error, 'problem', None) or error}; correct the line") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds no keys; write `key: value` lines")
    return values


def override(values: dict[str, Any], texts: Mapping[str, str], where: dict[str, str], literal: Container[str] = ()) -> None:
    """Replace values from files with values from the command line; `texts` maps dotted keys to YAML texts.

    literal: keys whose texts are not YAML, except the text null.
    """
    for name, text in texts.items():
        *sections, key = name.split(".")
        place = values
        for section in sections:
            if not isinstance(place.get(section), dict):
                place[section] = {}
            place = place[section]
        try:
            place[key] = text if name in literal and text != "null" else value(text)
        except TooMuch as error:
            raise UserError(f"command line: {name}: {error}; write the value that nmt-train --help describes") from None
        except (yaml.YAMLError, ValueError):
            place[key] = text
        _forget(f"{name}.", where)
        where[name] = COMMAND_LINE


def merge(into: dict[str, Any], values: Mapping[str, Any], whole: Container[str], prefix: str = "") -> None:
    """Merge `values` into `into` key by key; later values win. Mappings at dotted keys in `whole` are replaced whole."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and isinstance(into.get(key), dict) and name not in whole:
            merge(into[key], value, whole, f"{name}.")
        else:
            into[key] = value


def _nodes(node: Any) -> Iterator[Any]:
    """Yield every node of a document; a node that aliases repeat is yielded once per repetition."""
    yield node
    for inner in getattr(node, "value", ()) if not isinstance(node, yaml.ScalarNode) else ():
        for each in inner if isinstance(inner, tuple) else (inner,):
            yield from _nodes(each)


def _forget(prefix: str, where: dict[str, str]) -> None:
    """Forget where the parts of a value were set, which is being replaced."""
    for key in [key for key in where if key.startswith(prefix)]:
        del where[key]


def _locate(node: Any, path: Path, prefix: str, where: dict[str, str]) -> None:
    """Record the file and line of each key, also in lists (`stragglers.0.rank`); reject a duplicate key, which YAML accepts."""
    if isinstance(node, yaml.SequenceNode):
        _forget(prefix, where)
        for number, entry in enumerate(node.value):
            where[f"{prefix}{number}"] = f"{path}, line {entry.start_mark.line + 1}"
            _locate(entry, path, f"{prefix}{number}.", where)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        place = f"{path}, line {key.start_mark.line + 1}"
        if "." in str(key.value):
            *outer, inner = name.split(".")
            raise UserError(f"{place}: {name}: in a file, keys are nested, not dotted: write `{inner}:` below `{outer[-1]}:`")
        if name in seen:
            shown = ".".join(part for part in name.split(".") if not part.isdecimal())  # without the numbers of list entries
            raise UserError(f"{place}: {shown} is given twice; remove one")
        seen.add(name)
        where[name] = place
        _locate(value, path, f"{name}.", where)


def flatten(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, whose keys are dotted."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
