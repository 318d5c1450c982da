"""Keys of the configuration that are `auto` unless they are given.

The start decides them by the device and the corpus (training/defaults.py), or by the model that `init` names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nmt_train.common.errors import UserError
from nmt_train.common.yaml_file import flatten
from nmt_train.model import PRESETS, SIZES

AUTO = "auto"
OPEN = ("precision", "batch.tokens", "model.preset", "optimizer.learning_rate", "optimizer.warmup", "replicas.algorithm")


def without_auto(values: dict[str, Any], where: Mapping[str, str], known: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """Nested values without those that are `auto`, and the names of the keys that the start has to decide.

    where: maps dotted keys to the file and line that set them. known: the names of all keys. Raises UserError if a preset is to
    be decided by the corpus, but one of the sizes that it sets is given.
    """
    init = values.get("init") is not None
    sections = {name for name in values if isinstance(values[name], dict)}
    values = {name: dict(value) if name in sections else value for name, value in values.items()}
    undecided = []
    for name in OPEN:
        section, _, key = name.rpartition(".")
        its = values.get(section, {}) if section else values
        # The size of a batch may be given in sentences, and that of a model by its parts, which belong to preset small.
        instead = {"batch.tokens": ("sentences",), "model.preset": () if init else SIZES}.get(name, ())
        if isinstance(its, dict) and its.get(key, AUTO) == AUTO:
            wanted, given = its.pop(key, None), [other for other in instead if its.get(other) is not None]
            if wanted and given and name == "model.preset":
                place = where.get(f"model.{given[0]}", "config")
                raise UserError(f"{place}: model.preset auto would replace model.{given[0]}; remove one of the two")
            if not given:
                undecided.append(name)
    return values, [*undecided, *_of_model(values.get("model", {}), known, "model.preset" in undecided, init)]


def _of_model(model: Any, known: Iterable[str], preset: bool, init: bool) -> list[str]:
    """The keys of section `model` that come with a preset that is to be decided, or from the model that init names."""
    if not isinstance(model, dict):
        return []
    of_preset = [f"model.{key}" for key in PRESETS["small"]]
    inherited = [name for name in known if name.startswith("model.") and name not in ("model.preset", "model.lora_rank")]
    wanted = [name for name in inherited if preset or name not in of_preset] if init else of_preset if preset else []
    given = flatten(model, "model.")
    return [name for name in wanted if name not in given]
