"""Gradients that are lost for good, as with protocols that do not send lost messages again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Make
from simulated import FAST, parameters, run
from virtual import cluster, engine, together

from nmt_train.common.errors import UserError
from nmt_train.common.message import Message
from nmt_train.server.requests import Push
from nmt_train.simulation.compatibility import check
from nmt_train.simulation.virtual_transport import VirtualTransport
from nmt_train.transport import Tag

NEARLY_ALL = 1 - 1e-12
BEARING = ("vanilla", "overlap", "staleness-aware", "softsync", "downpour", "easgd", "thesis-sparse")
REFUSED = ("sync", "low-bit", "strom", "backup", "sparse", "sparse-overlap", "sparse-local")


def lossy(loss: float) -> dict[str, Any]:
    return {**FAST, "loss": loss, "resend": None}


def updates(folder: Path) -> int:
    return int(json.loads((folder / "last" / "checkpoint.json").read_text())["progress"]["updates"])


@pytest.mark.parametrize(
    ("kind", "left"),
    [(Push.EXCHANGE, Push.FETCH), (Push.GIVE, Push.REST), (Push.FETCH, Push.FETCH), (Push.REST, Push.REST)],
)
def test_the_request_arrives_without_its_gradient(kind: Push, left: Push) -> None:
    def send(transport: VirtualTransport) -> None:
        transport.send(1, Tag.PUSH, Message((kind, 5), (torch.ones(9),)))
        transport.send(2, Tag.PUSH, Message((kind, 5), (torch.ones(9),)))

    def got(transport: VirtualTransport) -> Message:
        return transport.receive(0, Tag.PUSH).result()[1]

    # Ranks 0 and 1 are on one machine.
    _, inside, across = together(engine([2, 1], loss=NEARLY_ALL, resend=None), send, got, got)
    assert (inside.number(), len(inside.tensors)) == (kind, 1)
    assert across.number() == left
    assert (len(across.tensors) == 0) == (kind in (Push.EXCHANGE, Push.GIVE))


def test_lost_bytes_take_as_long_as_others() -> None:
    def send(transport: VirtualTransport) -> None:
        for _ in range(3):
            transport.send(1, Tag.PUSH, Message((Push.GIVE, 1), (torch.ones(250),)))

    def arrivals(transport: VirtualTransport) -> list[float]:
        return [transport.receive(0, Tag.PUSH).result() and transport.now() for _ in range(3)]

    lost, whole = (together(engine([1, 1], loss=loss, resend=None), send, arrivals)[1] for loss in (NEARLY_ALL, 0.0))
    assert lost == whole


@pytest.mark.slow
@pytest.mark.parametrize("mode", BEARING)
def test_workers_go_on_and_shards_make_fewer_updates(make: Make, tmp_path: Path, mode: str) -> None:
    common = {"mode": mode, "stop__after": "10Kt", "batch__tokens": 300, "dropping__up": 0.9, "server__shards": 1}
    whole, half = (run(make, tmp_path / f"{loss}", [1, 1], places=lossy(loss), **common) for loss in (0.0, 0.5))
    assert parameters(whole) != parameters(half)
    assert 0.6 < updates(half) / updates(whole) < 0.9  # all from the machine of the shard, half of those of the other


@pytest.mark.parametrize("mode", REFUSED)
def test_modes_that_need_every_gradient_are_refused(make: Make, tmp_path: Path, mode: str) -> None:
    with pytest.raises(
        UserError, match=rf"^resend: null: mode {mode} needs every gradient, .* choose a mode .* --cluster.resend 0.2s$"
    ):
        run(make, tmp_path / "run", [1, 1], mode=mode, places=lossy(0.1))


@pytest.mark.parametrize("mode", REFUSED)
def test_where_nothing_can_be_lost_no_mode_is_refused(make: Make, mode: str) -> None:
    check(cluster([1, 1], loss=0.0, resend=None), make(mode=mode))
    check(cluster([2], loss=0.1, resend=None), make(mode=mode))
