"""Runs of the small configuration on simulated clusters, and what they leave."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from conftest import Make
from virtual import cluster

from nmt_train.modes.table import MODES, Replicas
from nmt_train.simulation.cluster import Cost, DeviceConfig, LinkConfig
from nmt_train.simulation.simulate import simulate

REPEATED = tuple(mode for mode in MODES if mode != "simuparallel")  # modes that exchange not only at the end of training
IN_STEP = tuple(mode for mode in MODES if isinstance(MODES[mode].family, Replicas))  # all workers exchange at the same step
AT_ONCE = {"network": LinkConfig("100 kB/s", "0s"), "inside": LinkConfig("1 MB/s", "0s")}  # so that ranks are in step
LINK = {"network": LinkConfig("100 kB/s", "1ms"), "inside": LinkConfig("1 MB/s", "0.1ms")}
FAST = {"network": LinkConfig("1000 GB/s", "1ms"), "inside": LinkConfig("1000 GB/s", "0.1ms")}
BUSY = DeviceConfig(
    forward=Cost("20ms", "0.05ms"), backward=Cost("30ms", "0.1ms"), update=Cost("1ms", "100ns"), encode=Cost("1ms", "50ns"),
    decode=Cost("0s", "10ns"), swap=Cost("0s", "10ns"),
)  # fmt: skip


def run(make: Make, folder: Path, nodes: list[int], device: DeviceConfig = BUSY, shuffle_seed: int | None = None,
        places: dict[str, Any] | None = None, **changes: Any) -> Path:  # fmt: skip
    every = 3 if changes.get("mode") in REPEATED else None
    config = dataclasses.replace(make(**{"local__every": every, **changes}), run=str(folder))
    assert simulate(config, cluster(nodes, device, **(places or LINK)), False, False, shuffle_seed) == 0
    return folder


def parameters(folder: Path) -> bytes:
    return (folder / "last" / "parameters.safetensors").read_bytes()


def trace(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted((folder / "trace").iterdir()))


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def words(folder: Path) -> int:
    return json.loads((folder / "last" / "checkpoint.json").read_text())["progress"]["tokens"]
