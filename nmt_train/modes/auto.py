"""`mode: auto`: what a choice of a mode replaces in the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nmt_train.common.yaml_file import override
from nmt_train.config import Config, flatten, leaves, plain, validate

AUTO = "auto"
# The sections that belong to a mode. A choice replaces them, because each choice was measured with its settings.
SECTIONS = (
    "override", "overlap", "pipeline", "local", "downpour", "exchange", "dropping", "threshold", "qsgd", "tiles", "low_rank",
)  # fmt: skip


def with_mode(config: Config, mode: str, settings: Mapping[str, str]) -> Config:
    """The configuration with this mode and its settings (dotted keys) instead of its own; UserError if one is not valid."""
    values = plain(config)
    for section in SECTIONS:
        values.pop(section)
    values["mode"] = mode
    values["batch"]["accumulate"] = 1
    override(values, settings, {})
    return validate(values, {})


def part_of_mode(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a choice sets, taken from a whole configuration as nested dictionaries; `with_part` puts it into another."""
    sections = {section: values[section] for section in SECTIONS if section in values}  # earlier versions lack some
    return {"mode": values["mode"], "accumulate": values["batch"]["accumulate"], **sections}


def with_part(config: Config, part: Mapping[str, Any]) -> Config:
    """The configuration with what `part_of_mode` returned for another one."""
    sections = dict(part)
    values = plain(config)
    values["batch"]["accumulate"] = sections.pop("accumulate")
    return validate({**values, **sections}, {})


def replaced(config: Config) -> list[str]:
    """The keys that were set, but that a choice replaces."""
    here = flatten(plain(config))
    keys = [name for name in here if name.split(".")[0] in SECTIONS or name == "batch.accumulate"]
    return [name for name in keys if here[name] != leaves()[name].default]
