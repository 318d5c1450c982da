"""Every product of schedule, exchange and codec either trains or is refused with a sentence."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from conftest import ROOT
from pulled import START, Vector, settings, target
from torch import Tensor
from virtual import engine, everybody_is_here, together

from nmt_train.common.errors import UserError
from nmt_train.distributed.codec import CODECS
from nmt_train.distributed.exchange import EXCHANGES
from nmt_train.distributed.schedule import SCHEDULES
from nmt_train.modes import build as modes
from nmt_train.modes.table import MODES
from nmt_train.optim.flat_model import FlatModel
from nmt_train.simulation.virtual_transport import VirtualTransport
from nmt_train.trace import Trace

NODES, STEPS = [2, 1], 24
OPTIONS: dict[str, Any] = {
    "local.every": 3, "downpour.push": 2, "downpour.fetch": 3, "threshold.density": 0.4, "dropping.up": 0.6,
    "qsgd.levels": 127, "stop.after": "9e",
}  # fmt: skip
PRODUCTS = [*itertools.product(SCHEDULES, EXCHANGES, CODECS)]


def trained(schedule: str, exchange: str, codec: str, mode: str = "vanilla") -> list[Tensor]:
    """Of every rank the parameters that all have in common in the end; all are pulled to the same place."""
    down = codec if exchange == "server" and codec != "qsgd" else "dense"
    chosen = settings(mode, OPTIONS | {
        "override.schedule": schedule, "override.exchange": exchange, "override.up": codec, "override.down": down,
    })  # fmt: skip
    room = engine([1] if exchange == "alone" else NODES)

    def work(transport: VirtualTransport) -> Tensor:
        torch.manual_seed(transport.rank)
        flat = FlatModel(Vector())
        mode = modes.check(chosen, transport.nodes)
        made = modes.build(mode, chosen, flat, transport, Trace(False, transport))
        made.refresh()
        for _ in range(STEPS):
            transport.spend("forward", 1)
            flat.gradient.add_((flat.parameters - target(1)) / transport.size, alpha=made.accumulator.add(1))
            made.step()
        made.drain()
        everybody_is_here(transport)
        made.refresh()
        return flat.parameters

    return together(room, *[work] * len(room.transports))


@pytest.mark.parametrize("mode", ["sync", "powersgd", "sparse-local", "strom"])
def test_a_codec_of_servers_is_refused_where_there_are_none(mode: str) -> None:
    with pytest.raises(UserError, match=f"override.down: encodes what servers send, but mode {mode} has .*; remove it"):
        modes.check(settings(mode, OPTIONS | {"override.down": "int8"}), (0, 1))


@pytest.mark.parametrize(
    ("mode", "options", "said"),
    [
        (
            "local-sgd",
            {
                "override.exchange": "server",
                "exchange.rule": "rounds",
                "exchange.backup": 1,
                "local.every": 1,
                "local.delay": 1,
            },
            "exchange.backup: .* would count as late",
        ),
        ("strom", {"override.schedule": "local-steps", "local.outer": "nesterov"}, "local.outer: nesterov needs rounds"),
        ("easgd", {"local.every": 0}, "local.every: with local.outer elastic"),
        ("diloco-async", {"override.down": "top-k"}, "exchange.own_updates: with top-k"),
        ("sync", {"exchange.bypass": False}, "exchange.bypass: needs exchange server"),
        ("sparse-local-async", {"override.up": "tile-top-k", "tiles.rate": 4.0}, "tiles.rate: needs exchange all-gather"),
    ],
)
def test_a_setting_without_its_meaning_is_refused(mode: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        modes.check(settings(mode, {"stop.after": "9e", **options}), (0, 1, 2, 3))


@pytest.mark.parametrize(("schedule", "exchange", "codec"), PRODUCTS)
def test_a_product_trains_or_is_refused(schedule: str, exchange: str, codec: str) -> None:
    try:
        found = trained(schedule, exchange, codec)
    except UserError as error:
        assert str(error).startswith(("override.", "mode:")), error
        assert ";" in str(error), "it says what to do"
        return
    assert all(torch.equal(one, other) for one, other in zip(found, trained(schedule, exchange, codec), strict=True))
    assert all(torch.equal(its, found[0]) for its in found)
    assert float((found[0] - target(1)).norm()) < 0.75 * float((START - target(1)).norm())


@pytest.mark.parametrize("mode", [mode for mode in MODES if MODES[mode].optimizer == "worker"])
@pytest.mark.parametrize("schedule", ["every-step", "pipelined"])
def test_gradients_are_not_taken_for_updates_where_the_modes_own_schedule_makes_those(mode: str, schedule: str) -> None:
    try:
        found = trained(schedule, "all-reduce", "dense", mode)
    except UserError as error:
        assert "; " in str(error)
        return
    assert float((found[0] - target(1)).norm()) < 0.75 * float((START - target(1)).norm())


def test_what_runs_and_what_does_not_is_known() -> None:
    """So that a rule that refuses too much, or too little, is seen."""
    counts: dict[str, int] = {}
    for schedule, exchange, codec in PRODUCTS:
        chosen = {"override.schedule": schedule, "override.exchange": exchange, "override.up": codec}
        try:
            modes.row(settings("vanilla", OPTIONS | chosen))
        except UserError:
            continue
        counts[f"{schedule} x {exchange}"] = counts.get(f"{schedule} x {exchange}", 0) + 1
    assert counts == {
        "every-step x alone": 1, "every-step x server": 10, "every-step x all-reduce": 5, "every-step x powersgd": 5,
        "every-step x all-gather": 10, "pipelined x all-gather": 10, "local-steps x all-gather": 10,
        "every-step x peers": 1, "overlapped x server": 10, "overlapped x peers": 1, "pipelined x all-reduce": 5,
        "pipelined x powersgd": 5, "local-steps x server": 10, "local-steps x all-reduce": 5, "local-steps x powersgd": 5,
        "every-step x low-bit": 1, "pipelined x low-bit": 1,
        "local-steps x peers": 1, "downpour x server": 10, "downpour x peers": 1,
    }  # fmt: skip


def test_every_mode_is_described() -> None:
    text = (ROOT / "docs" / "modes.md").read_text(encoding="utf-8")
    assert [mode for mode in MODES if f"| `{mode}` |" not in text] == []
