"""The cluster file: reading, checking and writing the description of a cluster, and the profile of a device."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import TypeAdapter, ValidationError

from nmt_train.common.errors import UserError
from nmt_train.common.paths import expanded
from nmt_train.common.section import problem
from nmt_train.common.yaml_file import COMMAND_LINE, override, read
from nmt_train.simulation.cluster import (
    Card,
    ClusterConfig,
    CodecConfig,
    Cost,
    Crash,
    Cut,
    DeviceConfig,
    Kill,
    LinkConfig,
    ScaleConfig,
    Straggler,
)  # fmt: skip

_SECTIONS: tuple[Any, ...] = (
    ClusterConfig, DeviceConfig, CodecConfig, Cost, LinkConfig, Straggler, Card, Crash, Kill, Cut, ScaleConfig,
)  # fmt: skip
_CLUSTER, _DEVICE = TypeAdapter(ClusterConfig), TypeAdapter(DeviceConfig)
_NOTHING: Mapping[str, str] = {}


def entries(section: Any = ClusterConfig, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the description of every key that holds a single value."""
    for name, info in section.__pydantic_fields__.items():
        inner = [kind for kind in (info.annotation, *get_args(info.annotation)) if kind in _SECTIONS]
        if inner and get_origin(info.annotation) not in (list, dict):
            yield from entries(inner[0], f"{prefix}{name}.")
        else:
            yield prefix + name, info.description or ""


def load(path: Path, overrides: Mapping[str, str] = _NOTHING) -> ClusterConfig:
    """Read a cluster file; `overrides` (dotted key to YAML text, from the command line) replace values of the file.

    Replaces `profile` by the `device` that the profile file holds. Raises UserError, which names the file, line and key of
    the mistake.
    """
    where: dict[str, str] = {}
    values = read(path, where, "give an existing cluster file to --cluster")
    override(values, overrides, where)
    cluster: ClusterConfig = _checked(_CLUSTER, values, where, path)

    def place(key: str) -> str:
        return where.get(key, str(path))

    if (cluster.profile is None) == (cluster.device is None):
        raise UserError(
            f"{path}: give either device (the cost of work) or profile (a file that nmt-simulate --measure printed)"
        )
    if cluster.profile is not None:
        other: dict[str, str] = {}
        try:
            file = path.parent / expanded(cluster.profile)
        except UserError as error:
            raise UserError(f"{place('profile')}: profile: {error}") from None
        device = _checked(_DEVICE, read(file, other, "measure one with nmt-simulate --measure"), other, file)
        cluster = dataclasses.replace(cluster, device=device, profile=None)
    _check(cluster, place)
    return cluster


def _check(cluster: ClusterConfig, place: Callable[[str], str]) -> None:
    """Raise UserError if parts of the cluster do not fit each other. place: where a key was set."""
    if any(devices < 1 for devices in cluster.nodes):
        raise UserError(f"{place('nodes')}: nodes: {cluster.nodes}: every machine needs at least one device")
    for kind, count, names in (
        ("node", len(cluster.nodes), ("crashes", "cuts", "cards")),
        ("rank", sum(cluster.nodes), ("stragglers", "kills")),
    ):
        for name in names:
            for number in (getattr(its, kind) for its in getattr(cluster, name)):
                if number >= count:
                    raise UserError(
                        f"{place(name)}: {name}: there is no {kind} {number}; the {count} {kind}s are numbered from 0"
                    )
    for name, numbers in (
        ("cards", [card.node for card in cluster.cards]), ("stragglers", [its.rank for its in cluster.stragglers]),
    ):  # fmt: skip
        if twice := [number for number in numbers if numbers.count(number) > 1]:
            raise UserError(f"{place(name)}: {name}: {twice[0]} is given twice; give it once")
    if cluster.transfers == "turns" and (cluster.cuts or cluster.crashes):
        raise UserError(
            f"{place('transfers')}: transfers: turns allow no cuts and no crashes; write share, or remove cuts and crashes"
        )
    for cut in cluster.cuts:
        if cut.until <= cut.at:
            raise UserError(f"{place('cuts')}: cuts: node {cut.node}: until {cut.until:g} s must be after at {cut.at:g} s")
    for cut, later in pairwise(sorted(cluster.cuts, key=lambda cut: (cut.node, cut.at))):
        if later.node == cut.node and later.at <= cut.until:
            raise UserError(
                f"{place('cuts')}: cuts: node {cut.node}: the next cut, at {later.at:g} s, must begin after the end of this"
                f" one, at {cut.until:g} s; give one cut instead of both"
            )


def parse(text: str) -> ClusterConfig:
    """The cluster in the contents of a cluster file without `profile`, such as `described` returns. Raises UserError."""
    try:
        cluster: ClusterConfig = _CLUSTER.validate_python(yaml.safe_load(text))
    except (yaml.YAMLError, ValidationError) as error:
        what = problem(error).text if isinstance(error, ValidationError) else str(error).partition("\n")[0]
        raise UserError(f"not a cluster file of this version ({what}); measure the machines again") from None
    return cluster


def described(cluster: ClusterConfig) -> str:
    """The cluster as YAML, with profile and overrides applied; times in seconds, bandwidths in bytes per second."""
    text: str = yaml.safe_dump(_CLUSTER.dump_python(cluster, mode="json"), sort_keys=False)
    return text


def to_yaml(device: DeviceConfig, title: str) -> str:
    """The contents of a profile file, which the key `profile` of a cluster file can name. title: its first line."""

    def said(cost: Cost) -> str:
        return f"{{seconds: {cost.seconds * 1e3:.6g} ms, per_unit: {cost.per_unit * 1e9:.6g} ns}}"

    lines = [f"# {title}", *(f"{kind}: {said(cost)}" for kind, cost in vars(device).items() if isinstance(cost, Cost))]
    lines.append(f"response: {device.response * 1e3:.6g} ms")
    if device.parameters is not None:
        lines.append(f"parameters: {device.parameters / 1e6:.4g}M          # of the model that was measured")
    lines += ["codecs:"] * bool(device.codecs)
    for name, its in device.codecs.items():
        lines.append(f"  {name}: {{encode: {said(its.encode)}, decode: {said(its.decode)}}}")
    return "\n".join(lines) + "\n"


def _checked(adapter: TypeAdapter[Any], values: dict[str, Any], where: Mapping[str, str], path: Path) -> Any:
    try:
        return adapter.validate_python(values)
    except ValidationError as error:
        wrong = problem(error)
        kind, keys, text = wrong.kind, wrong.path, wrong.text
        name = ".".join(keys)
        known = [key for key in where if name == key or name.startswith(key + ".")]
        place = where[max(known, key=len)] if known else str(path)
        name = f"cluster.{name}" if place == COMMAND_LINE else name
        if kind == "missing" and adapter is _CLUSTER and "forward" in values:
            raise UserError(f"{place}: is the profile of a device; give a cluster file that names it as profile") from None
        if kind == "missing":
            raise UserError(f"{place}: {name} is missing; give it") from None
        if kind in ("unexpected_keyword_argument", "extra_forbidden"):
            valid = [key for section in _SECTIONS for key in section.__dataclass_fields__]
            near = difflib.get_close_matches(keys[-1], valid, n=1, cutoff=0.5)
            raise UserError(f"{place}: unknown key {name}" + (f"; did you mean {near[0]}?" if near else "")) from None
        raise UserError(f"{place}: {name}: {text}") from None
