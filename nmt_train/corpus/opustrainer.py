"""Converts a configuration of OpusTrainer (github.com/hplt-project/OpusTrainer): datasets, stages, weights and modifiers."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from nmt_train.common.errors import UserError
from nmt_train.common.plural import counted
from nmt_train.common.section import listed
from nmt_train.common.yaml_file import read
from nmt_train.corpus.text import read_pairs

_KEYS = ("datasets", "stages", "modifiers", "seed", "num_fields", "trainer", "version")
_NOISE = {"UpperCase": "upper", "TitleCase": "title", "Typos": "typos"}  # our name for a modifier
_MOST_EPOCHS, _NEAR = 20, 0.02  # of the shortest stage; a length in epochs that is off by this share is near enough


class _Stage(NamedTuple):
    """weights: by dataset. until: the dataset whose passes are counted; passes: after how many the stage ends, or infinity."""

    name: str
    weights: dict[str, float]
    until: str
    passes: float


class _File:
    """The values of a file, and where each key is."""

    def __init__(self, path: Path) -> None:
        self._path, self._where = path, dict[str, str]()
        self.values = read(path, self._where, "name the YAML file that opustrainer-train reads (--config)")

    def wrong(self, key: str, text: str) -> UserError:
        """key: dotted; the place of the nearest key above it is named if it has none of its own."""
        parts = key.split(".")
        above = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        return UserError(f"{next((self._where[name] for name in above if name in self._where), self._path)}: {text}")


def convert(path: Path) -> str:
    """The configuration for nmt-train (YAML) that trains on the same mixture; corpus.valid and the rest have to be added.

    Stages become weights that change with the epoch. The length of an epoch is chosen so that every stage has a whole number of
    epochs, to within some percent. Raises UserError for what nmt-train does not have.
    """
    file = _File(path)
    datasets, stages = _datasets(file, path.parent), _stages(file)
    used = [name for name in datasets if any(stage.weights.get(name) for stage in stages)]
    sizes = {name: sum(1 for _ in read_pairs([datasets[name]], f"datasets: {name}")) for name in used}
    lengths = [stage.passes * sizes[stage.until] * sum(stage.weights.values()) / stage.weights[stage.until] for stage in stages]
    finite = [length for length in lengths if length < math.inf]
    epoch = _epoch(finite) if finite else 0
    epochs = [max(1, round(length / epoch)) for length in finite]
    firsts = [1 + sum(epochs[:number]) for number in range(len(stages))]
    noise = _modifiers(file, file.values.get("modifiers"), "modifiers")
    for stage in stages:
        own = file.values[stage.name].get("modifiers") if isinstance(file.values[stage.name], dict) else None
        if own is not None and _modifiers(file, own, stage.name) != noise:
            raise file.wrong(f"{stage.name}.modifiers", f"stage {stage.name}: in nmt-train, noise is the same in all stages")
    train = [
        {"name": name, "files": [datasets[name]], "weight": _weight([its.weights.get(name, 0.0) for its in stages], firsts)}
        | ({"noise": dict(noise)} if noise else {})
        for name in used
    ]
    values: dict[str, Any] = {"corpus": ({"epoch": epoch} if len(stages) > 1 else {}) | {"train": train}}
    if "seed" in file.values:
        values["seed"] = int(file.values["seed"])
    if len(finite) == len(stages):
        values["stop"] = {"after": f"{sum(epochs)}e"}
    said = [f"# The mixture of {path}. Add corpus.valid and the rest in another file: --config mixture.yml --config mine.yml"]
    for stage, first, length, rounded in zip(stages, firsts, lengths, [*epochs, 0], strict=False):
        took = f"{length:,.0f} pairs, {counted(rounded, 'epoch')}" if length < math.inf else "without end"
        said.append(f"# {stage.name}: from epoch {first} on; until {stage.passes:g} passes over {stage.until}: {took}")
    return (
        "\n".join(said) + "\n" + yaml.safe_dump(values, sort_keys=False, default_flow_style=None, allow_unicode=True, width=120)
    )


def _datasets(file: _File, folder: Path) -> dict[str, list[str]]:
    """The files of each dataset."""
    found = file.values.get("datasets")
    if not isinstance(found, dict) or not found:
        raise file.wrong("datasets", "datasets: name the files, as in `clean: clean.tsv`")
    paths = {str(name): files if isinstance(files, list) else [files] for name, files in found.items()}
    return {name: [os.path.join(folder, str(path)) for path in files] for name, files in paths.items()}


def _stages(file: _File) -> list[_Stage]:
    names = file.values.get("stages")
    if not isinstance(names, list) or not names:
        raise file.wrong("stages", "stages: list the names of the stages")
    for key in file.values:
        if key not in (*_KEYS, *names):
            raise file.wrong(str(key), f"{key}: is neither a stage nor a key that nmt-train knows; remove it")
    stages = [_stage(file, str(name)) for name in names]
    for stage in stages[:-1]:
        if stage.passes == math.inf:
            raise file.wrong(stage.name, f"stage {stage.name} never ends (inf), so that the next never begins; give a number")
    return stages


def _stage(file: _File, name: str) -> _Stage:
    its = file.values.get(name)
    lines = its.get("mix") if isinstance(its, dict) else its
    if not isinstance(lines, list) or not lines:
        raise file.wrong(name, f"stage {name}: list its datasets with their weights, and `until DATASET PASSES`")
    *mix, last = (str(line).split() for line in lines)
    weights = dict[str, float]()
    for number, words in enumerate(mix):
        weight = _number(words[1]) if len(words) == 2 else math.nan
        if words[0] not in file.values["datasets"] or not 0 <= weight < math.inf:
            known = listed(file.values["datasets"])
            raise file.wrong(
                f"{name}.{number}", f"stage {name}: {' '.join(words)!r} is not a dataset ({known}) and its weight; correct it"
            )
        weights[words[0]] = weight
    passes = _number(last[2]) if len(last) == 3 and last[0] == "until" else math.nan
    if not passes > 0 or not weights.get(last[1]):
        raise file.wrong(
            f"{name}.{len(mix)}",
            f"stage {name}: {' '.join(last)!r} is not `until DATASET PASSES` with a dataset of this stage; correct it",
        )
    return _Stage(name, weights, last[1], passes)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _modifiers(file: _File, entries: Any, key: str) -> dict[str, float]:
    """Our noise for a list of modifiers."""
    found = dict[str, float]()
    for entry in _flat(entries or []):
        name, *options = entry if isinstance(entry, Mapping) else (str(entry),)
        if name not in _NOISE:
            raise file.wrong(key, f"modifier {name}: nmt-train has only {listed(_NOISE)}; remove it, or apply it to the files")
        if options:
            raise file.wrong(key, f"modifier {name}: nmt-train does not have {', '.join(options)}; remove these options")
        share = _number(str(entry[name]))
        if not 0 <= share <= 1:
            raise file.wrong(key, f"modifier {name}: {entry[name]} is not a probability from 0 to 1; correct it")
        found[_NOISE[name]] = share
    return found


def _flat(entries: Any) -> Iterator[Any]:
    """The entries of lists in lists, which YAML references make."""
    for entry in entries if isinstance(entries, list) else [entries]:
        if isinstance(entry, list):
            yield from _flat(entry)
        else:
            yield entry


def _epoch(lengths: list[float]) -> int:
    """The pairs of an epoch: the largest part of the shortest stage of which all stages are nearly multiples."""

    def off(pairs: float) -> float:
        return max(abs(round(length / pairs) * pairs / length - 1) for length in lengths)

    choices: list[float] = [min(lengths) / part for part in range(1, _MOST_EPOCHS + 1)]
    return max(1, round(next((choice for choice in choices if off(choice) <= _NEAR), sorted(choices, key=off)[0])))


def _weight(weights: list[float], firsts: list[int]) -> float | dict[int, float]:
    """The weight of a dataset: one number, or one from each epoch on in which it changes."""
    changes = {
        first: weight for first, weight, before in zip(firsts, weights, [math.nan, *weights], strict=False) if weight != before
    }
    return weights[0] if len(changes) == 1 else changes
