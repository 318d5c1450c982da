"""The configuration as text: as a YAML file with comments, and grouped by who has chosen each value."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import yaml

from nmt_train.common.yaml_file import flatten
from nmt_train.config import Config, entries, leaves, plain, validate


def to_yaml(config: Config) -> str:
    """All values as YAML, with a comment above every key."""
    flat = flatten(plain(config))
    return _yaml(flat, flat)


def by_origin(config: Config, of_mode: Mapping[str, str]) -> str:
    """What you, the start, the mode and the defaults choose. As YAML, it has your choices; the rest are comments.

    of_mode: texts with the values that the mode gives to keys, and why.
    """
    flat = flatten(plain(config))
    yours = _differing(config, flat)
    left = [name for name in flat if name not in yours]
    groups = {
        "Decided when training starts, by the device, the corpus and init": dict.fromkeys(config.undecided, "auto"),
        f"Chosen by mode {config.mode}, here for two workers; the log says it for yours": of_mode,
    }
    decided = {name for group in groups.values() for name in group}
    groups["Defaults (--help KEY explains a key)"] = {name: _scalar(flat[name]) for name in left if name not in decided}
    lines = ["# Your choices, and what has no default", _yaml(flat, yours)]
    for title, values in groups.items():
        lines += [f"# {title}:", *(f"#   {name}: {text}" for name, text in values.items()), ""] if values else []
    return "\n".join(lines).rstrip() + "\n"


def _yaml(flat: Mapping[str, Any], names: Collection[str]) -> str:
    """These keys, with a comment above each."""
    lines: list[str] = []
    for key in entries():
        if isinstance(key, str):
            name, _, description = key.partition(": ")
            depth = name.count(".")
            if any(shown_name.startswith(name + ".") for shown_name in names):
                lines += ["", f"{'  ' * depth}# {description}", f"{'  ' * depth}{name.rsplit('.', 1)[-1]}:"]
        elif key.name in names:
            indent = "  " * key.name.count(".")
            lines += [f"{indent}# {key.description}", f"{indent}{key.name.rsplit('.', 1)[-1]}: {_scalar(flat[key.name])}"]
    return "\n".join(lines).strip() + "\n"


def _scalar(value: Any) -> str:
    """A value on one line of YAML."""
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()


def _differing(config: Config, flat: Mapping[str, Any]) -> set[str]:
    """The keys that are required or differ from the defaults, which depend on model.preset and on init."""
    required = {key.name for key in leaves().values() if key.required}
    chosen = {name for name in ("model.preset", "init") if flat[name] != leaves()[name].default}
    values: dict[str, Any] = {"init": flat["init"]}
    for name in required | {"model.preset"}:
        section, _, key = name.rpartition(".")
        values.setdefault(section, {})[key] = flat[name]
    values["corpus"]["train"] = ["a", "b"]  # it needs no alignments, which need other keys
    usual = flatten(plain(validate(values, {})))
    unused = {"batch.tokens"} if flat["batch.sentences"] is not None else set()
    return {name for name, value in flat.items() if name in required | chosen or value != usual.get(name)} - unused


def shown(value: Any) -> str:
    """Format a default value for help texts and comments."""
    if isinstance(value, list):
        return "[" + ", ".join(map(str, value)) + "]"
    if isinstance(value, float):
        return f"{value:.10g}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
