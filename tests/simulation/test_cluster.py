"""Cluster files: what they say, and one sentence for what they cannot mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT

from nmt_train.common.errors import UserError
from nmt_train.simulation import cluster_file
from nmt_train.simulation.cluster import CodecConfig, Cost, DeviceConfig

GOOD: dict[str, Any] = {
    "nodes": [2, 1],
    "device": {"forward": {"seconds": "50 ms", "per_unit": "240us"}},
    "network": {"bandwidth": "100 Mbit/s", "latency": "0.5ms"},
    "inside": {"bandwidth": "7 GB/s"},
}


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "cluster.yml"
    path.write_text(yaml.safe_dump({key: value for key, value in (GOOD | changes).items() if value is not None}))
    return path


def test_times_and_bandwidths_have_units(tmp_path: Path) -> None:
    loaded = cluster_file.load(write(tmp_path, scale={"parameters": "110.7M"}, bus="64 kbit/s"))
    assert loaded.ranks() == (0, 0, 1)
    assert loaded.device is not None
    assert vars(loaded.device.forward) == pytest.approx({"seconds": 0.05, "per_unit": 240e-6})
    assert loaded.network.bandwidth == 12.5e6
    assert loaded.network.latency == 0.5e-3
    assert loaded.inside.bandwidth == 7e9
    assert loaded.bus == 8000
    assert loaded.scale is not None
    assert loaded.scale.parameters == pytest.approx(110.7e6)


def test_a_profile_is_a_file_beside_the_cluster_and_reads_what_is_written(tmp_path: Path) -> None:
    codec = CodecConfig(encode=Cost(0.0, 1e-8), decode=Cost(0.0, 2e-9))
    device = DeviceConfig(forward=Cost(0.01, 2e-4), update=Cost(0.0, 1.5e-10), codecs={"low-bit": codec}, parameters="7.5M")
    (tmp_path / "mine.yml").write_text(cluster_file.to_yaml(device, "measured"))
    read = cluster_file.load(write(tmp_path, device=None, profile="mine.yml")).device
    assert read == device


def test_the_command_line_replaces_single_values(tmp_path: Path) -> None:
    overrides = {"nodes": "80 x 1", "network.bandwidth": "1 Gbit/s", "scale.parameters": "60M"}
    loaded = cluster_file.load(write(tmp_path), overrides)
    assert len(loaded.ranks()) == 80
    assert (loaded.network.bandwidth, loaded.network.latency) == (125e6, 0.5e-3)
    assert loaded.scale is not None
    with pytest.raises(UserError, match="command line: cluster.network.bandwidth: 'fast' is not a bandwidth"):
        cluster_file.load(write(tmp_path), {"network.bandwidth": "fast"})


CLUSTERS = [path for path in sorted((ROOT / "configs" / "clusters").glob("*.yml")) if "\nnodes:" in path.read_text()]


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_every_cluster_that_comes_along_can_be_read(path: Path) -> None:
    loaded = cluster_file.load(path)
    if path.stem.startswith("thesis-"):
        nodes, devices = map(int, path.stem.removeprefix("thesis-").split("x"))
        assert loaded.nodes == [devices] * nodes


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"network": {"bandwidth": "100 Mbit/s", "latency": "-1ms"}},
            "yml, line .*network.latency: '-1ms' is not a time",
        ),
        ({"network": {"bandwidth": "0 Mbit/s"}}, "network.bandwidth: '0 Mbit/s' is not a bandwidth"),
        ({"network": {"bandwidth": "100 Mx"}}, "network.bandwidth: '100 Mx' is not a bandwidth: write .* as in 10 Gbit/s"),
        ({"network": None}, "network is missing; give it"),
        ({"newtork": {}}, "unknown key newtork; did you mean network"),
        ({"device": {"forwards": {}}}, "unknown key device.forwards; did you mean forward"),
        (
            {"device": {"codecs": {"lowbit": {"encode": {}, "decode": {}}}}},
            "codecs.lowbit: it should be low-bit, .*, not",
        ),
        ({"device": {"codecs": {"low-bit": {"encode": {}}}}}, "device.codecs.low-bit.decode is missing; give it"),
        ({"device": {"forward": {"seconds": "fast"}}}, "device.forward.seconds: 'fast' is not a time"),
        ({"device": None}, "give either device .* or profile"),
        ({"profile": "x.yml"}, "give either device .* or profile"),
        (
            {"device": None, "profile": "none.yml"},
            "none.yml: No such file .*; measure one with nmt-simulate --measure",
        ),
        ({"device": None, "profile": "~nobody-here/x.yml"}, "no such user; write the whole path"),
        ({"nodes": []}, "nodes: "),
        ({"nodes": [1, 0]}, "nodes: .*every machine needs at least one device"),
        ({"nodes": "many"}, "nodes: 'many' is not a list of machines: write the devices of each, as in .* or 1000 x 1"),
        ({"nodes": "3 x 0"}, "nodes: .*every machine needs at least one device"),
        ({"nodes": "0 x 3"}, "nodes: "),
        ({"jitter": "-0.5"}, "jitter: it should be greater than or equal to 0"),
        ({"loss": "1"}, "loss: it should be less than 1"),
        ({"crashes": [{"node": 2, "at": "5s"}]}, "crashes: there is no node 2; the 2 nodes are numbered from 0"),
        ({"transfers": "turns", "crashes": [{"node": 1, "at": "5s"}]}, "transfers: turns allow no cuts and no crashes"),
        ({"cuts": [{"node": 1, "at": "5s", "until": "5s"}]}, "cuts: node 1: until 5 s must be after at 5 s"),
        (
            {"cuts": [{"node": 1, "at": "5s", "until": "9s"}, {"node": 1, "at": "9s", "until": "20s"}]},
            "cuts: node 1: the next cut, at 9 s, must begin after the end of this one, at 9 s; give one cut instead of both",
        ),
        ({"stragglers": [{"rank": 3, "factor": 2}]}, "stragglers: there is no rank 3; the 3 ranks are numbered from 0"),
        ({"stragglers": [{"rank": 1, "factor": 2}, {"rank": 1, "factor": 3}]}, "stragglers: 1 is given twice; give it once"),
        (
            {"cards": [{"node": 1, "bandwidth": "1 MB/s"}, {"node": 1, "bandwidth": "2 MB/s"}]},
            "cards: 1 is given twice; give it once",
        ),
        ({"kills": [{"rank": 3, "at": "5s"}]}, "kills: there is no rank 3; the 3 ranks are numbered from 0"),
        ({"stragglers": [{"rank": 0, "factor": 0}]}, "stragglers.0.factor: it should be greater than 0"),
        ({"scale": {"parameters": "0"}}, "scale.parameters: '0' is not a number of parameters: write it as 110.7M"),
    ],
)
def test_what_a_cluster_cannot_be_is_said_in_one_sentence(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as error:
        cluster_file.load(write(tmp_path, **changes))
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(str(tmp_path))


def test_a_file_that_is_not_there_or_no_yaml_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none.yml: No such file or directory; give an existing cluster file to --cluster"):
        cluster_file.load(tmp_path / "none.yml")
    (tmp_path / "broken.yml").write_text("nodes: [1\nnetwork: x\n")
    with pytest.raises(UserError, match=r"broken.yml, line \d: not YAML"):
        cluster_file.load(tmp_path / "broken.yml")
