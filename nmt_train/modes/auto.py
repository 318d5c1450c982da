"""`mode: auto`: what a choice of a mode replaces in the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nmt_train.common.yaml_file import flatten, override
from nmt_train.config import Config, leaves, plain, validate

AUTO = "auto"
# The sections that belong to a mode. A choice replaces them, because each choice was measured with its settings.
SECTIONS = (
    "server", "replicas", "peers", "overlap", "pipeline", "local", "dropping", "threshold", "tiles",
    "low_rank", "low_bit",
)  # fmt: skip
_ACCUMULATE = "batch.accumulate"


def with_mode(config: Config, mode: str, settings: Mapping[str, str]) -> Config:
    """The configuration with this mode and its settings (dotted keys) instead of its own; UserError if one is not valid."""
    values = plain(config)
    for section in SECTIONS:
        values.pop(section)
    values["mode"] = mode
    values["batch"]["accumulate"] = 1
    override(values, settings, {})
    return validate(values, {})


def part_of_mode(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that a choice sets, of a configuration as a mapping of dotted keys; `with_values` puts them into another.

    Keys that `flat` lacks have their defaults; keys that no longer exist are left out.
    """
    return {name: flat.get(name, key.default) for name, key in leaves().items() if name == "mode" or _replaces(name)}


def replaced(config: Config) -> list[str]:
    """The keys that were set, but that a choice replaces."""
    here = flatten(plain(config))
    return [name for name, key in leaves().items() if _replaces(name) and here[name] != key.default]


def _replaces(name: str) -> bool:
    return name == _ACCUMULATE or name.split(".")[0] in SECTIONS
