"""Every mode with every codec either trains or is refused with a sentence."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from conftest import ROOT
from pulled import START, Vector, settings, strategy_of, target
from torch import Tensor
from virtual import engine, everybody_is_here, together

from nmt_train.codec import CODECS
from nmt_train.common.errors import UserError
from nmt_train.modes import resolve as modes
from nmt_train.modes.table import MODES, Replicas, Server
from nmt_train.optim.flat_model import FlatModel
from nmt_train.simulation.virtual_transport import VirtualTransport

NODES, STEPS = [2, 1], 24
OPTIONS: dict[str, Any] = {
    "local.every": 3, "local.delay": 0, "threshold.density": 0.4, "dropping.up": 0.6,
    "stop.after": "9e", "optimizer.name": "sgd",
}  # fmt: skip
BY_SERVER = [mode for mode, row in MODES.items() if isinstance(row.family, Server)]
REPLICAS = [mode for mode, row in MODES.items() if isinstance(row.family, Replicas)]
PAIRS = [*itertools.product([*BY_SERVER, *REPLICAS], CODECS)]


def sent(mode: str, codec: str) -> dict[str, Any]:
    """The setting by which workers send with this codec, and how often they pull."""
    return {"server.up": codec, "server.pull_every": 3} if mode in BY_SERVER else {"replicas.codec": codec}


def trained(mode: str, codec: str) -> list[Tensor]:
    """Of every rank the parameters that all have in common in the end; all are pulled to the same place."""
    chosen = settings(mode, OPTIONS | sent(mode, codec))
    room = engine(NODES)

    def work(transport: VirtualTransport) -> Tensor:
        torch.manual_seed(transport.rank)
        flat = FlatModel(Vector())
        made = strategy_of(chosen, flat, transport)
        made.refresh()
        for _ in range(STEPS):
            transport.spend("forward", 1)
            flat.gradient.add_((flat.parameters - target(1)) / transport.size, alpha=made.accumulator.add(1))
            made.step()
        made.drain()
        everybody_is_here(transport)
        made.refresh()
        return getattr(made, "received", flat.parameters)  # the center, where workers have parameters of their own

    return together(room, *[work] * len(room.transports))


@pytest.mark.parametrize(("mode", "own"), [("sync", "replicas"), ("sparse-local", "replicas"), ("strom", "peers")])
def test_a_key_of_another_section_is_refused(mode: str, own: str) -> None:
    with pytest.raises(UserError, match=f"server.down: the settings of mode {mode} are in section {own}; remove it"):
        modes.resolve(settings(mode, OPTIONS | {"server.down": "int8"}), (0, 1))
    with pytest.raises(UserError, match=r"replicas.codec: the settings of mode vanilla are in section server; use server.up"):
        modes.resolve(settings("vanilla", OPTIONS | {"replicas.codec": "half"}), (0, 1))


@pytest.mark.parametrize(
    ("mode", "options", "said"),
    [
        (
            "diloco-async",
            {"server.rule": "rounds", "server.backup": 1, "local.every": 1, "local.delay": 1},
            "server.backup: .* would count as late",
        ),
        ("easgd", {"local.every": 0}, "local.every: with local.outer elastic"),
        (
            "sparse-local-async",
            {"server.up": "tile-top-k", "tiles.rate": 4.0},
            "only for mode sparse-local, not sparse",
        ),
    ],
)
def test_a_setting_without_its_meaning_is_refused(mode: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        modes.resolve(settings(mode, {"stop.after": "9e", **options}), (0, 1, 2, 3))


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("mode", ["overlap", "diloco-async", "sync", "sparse-local"])
def test_a_mode_trains_with_a_codec_or_is_refused(mode: str, codec: str) -> None:
    """One mode of each kind; every mode trains with its own codec in tests/simulation/test_simulate.py."""
    try:
        found = trained(mode, codec)
    except UserError as error:
        assert str(error).startswith(("server.", "replicas.")), error
        assert ";" in str(error), "it says what to do"
        return
    assert all(torch.equal(one, other) for one, other in zip(found, trained(mode, codec), strict=True))
    assert all(torch.equal(its, found[0]) for its in found)
    assert float((found[0] - target(1)).norm()) < 0.75 * float((START - target(1)).norm())


def test_which_codecs_a_mode_accepts_is_known() -> None:
    """So that a rule that refuses too much, or too little, is seen."""
    counts = dict.fromkeys([*BY_SERVER, *REPLICAS], 0)
    for mode, codec in PAIRS:
        try:
            modes.resolve(settings(mode, OPTIONS | sent(mode, codec)))
            counts[mode] += 1
        except UserError:
            pass
    summed = {"sync": 5, "powersgd": 5, "pipe": 5, "local-sgd": 5, "simuparallel": 5, "diloco": 5}
    one = {"low-bit": 1, "backup": 1}
    assert {mode: count for mode, count in counts.items() if count != len(CODECS)} == summed | one


@pytest.mark.parametrize("mode", MODES)
def test_every_setting_of_a_mode_has_an_effect(mode: str) -> None:
    values = modes._Values(MODES[mode])
    modes._plan(settings(mode, {}), MODES[mode], (0, 1), values)
    assert MODES[mode].settings.keys() <= values.chosen.keys() | {"optimizer.name"}


def test_every_mode_is_described() -> None:
    text = (ROOT / "docs" / "modes.md").read_text(encoding="utf-8")
    assert [mode for mode in MODES if f"| `{mode}` |" not in text] == []
