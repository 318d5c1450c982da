"""Whatever the layout, the delays and the order of messages: every gradient reaches the parameters once, in every mode.

Gradients and parameters are small whole numbers, so that sums are exact in any order. scripts/soak tries thousands of orders.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from conftest import small
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pulled import strategy_of
from torch import nn
from virtual import engine, everybody_is_here, together

from nmt_train import config as configuration
from nmt_train.optim.flat_model import FlatModel
from nmt_train.simulation.cluster import Cost, DeviceConfig
from nmt_train.simulation.virtual_transport import VirtualTransport

ELEMENTS, STEPS = 37, 6
START = torch.arange(ELEMENTS, dtype=torch.float32)
LAYOUTS = st.lists(st.integers(1, 3), min_size=1, max_size=3)  # devices of each machine
ORDERS = int(os.environ.get("NMT_TRAIN_ORDERS", "50"))
OPTIONS: dict[str, Any] = {
    "server.bypass": st.sampled_from(("none", "device", "node")),
    "server.bundle": st.integers(1, 3),
    "server.per": st.sampled_from(["device", "node"]),
    "server.one_channel_per_node": st.booleans(),
    "overlap.bound": st.integers(0, 2),
    "overlap.local_update": st.sampled_from(["none", "sum", "optimizer"]),
    "dropping.up": st.sampled_from([0.5, 0.9]),
    "dropping.down": st.sampled_from([None, 0.5, 0.9]),
    "server.shards": st.sampled_from([None, 1, 2]),
    "server.down": st.sampled_from([None, "dense"]),
}


class Numbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(START.clone())


def config(mode: str, options: dict[str, Any]) -> configuration.Config:
    values = small("unused", "unused") | {"mode": mode, "batch": {"reduction": "sum"}}  # type: ignore[arg-type]
    values["optimizer"] = {"name": "sgd", "learning_rate": 1, "schedule": "constant", "warmup": 0, "clip_norm": 0}
    for name, value in options.items():
        section, key = name.split(".")
        values.setdefault(section, {})[key] = value
    return configuration.validate(values, {})


def gradients(rank: int, seed: int) -> torch.Tensor:
    return torch.randint(-4, 5, (STEPS, ELEMENTS), generator=torch.Generator().manual_seed(1000 * rank + seed)).float()


def train(
    mode: str, nodes: list[int], seed: int, options: dict[str, Any], silent: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of every rank, after all gave their gradients away and were drained: the global parameters, and what it did not send.

    After `silent` further steps without a gradient: the rank's own parameters instead.
    """
    costs = DeviceConfig(forward=Cost(0.01, 1e-4), backward=Cost(0.02, 2e-4), update=Cost(0.01, 0))
    room, chosen = engine(nodes, seed, device=costs), config(mode, options)

    def work(transport: VirtualTransport) -> tuple[torch.Tensor, torch.Tensor]:
        flat = FlatModel(Numbers())
        strategy = strategy_of(chosen, flat, transport)
        strategy.refresh()
        for number, gradient in enumerate(gradients(transport.rank, seed)):
            transport.spend("forward", 100 * (number + 1))
            flat.gradient.add_(gradient, alpha=strategy.accumulator.add(1))
            strategy.step()
        strategy.drain()
        everybody_is_here(transport)
        for _ in range(silent):
            strategy.step()
            strategy.drain()
        everybody_is_here(transport)
        if not silent:
            strategy.refresh()
        state, none = strategy.state(), torch.zeros(ELEMENTS)
        # By plain descent, an unsent update is -1 times a gradient.
        return flat.parameters, (none if state.residual is None else state.residual) - (
            none if state.unsent is None else state.unsent
        )

    return together(room, *[work] * len(room.transports))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["vanilla", "overlap", "sparse", "sparse-overlap"])
@settings(max_examples=ORDERS, suppress_health_check=[HealthCheck.too_slow])
@given(
    nodes=LAYOUTS,
    seed=st.integers(0, 10**6),
    options=st.fixed_dictionaries(OPTIONS),
)
def test_every_gradient_reaches_the_parameters_once(mode: str, nodes: list[int], seed: int, options: dict[str, Any]) -> None:
    found = train(mode, nodes, seed, options)
    given_away = sum(gradients(rank, seed).sum(0) for rank in range(len(found)))
    unsent = sum(owed for _, owed in found)
    for parameters, _ in found:
        # Sums of several steps are divided and multiplied again, which rounds; a gradient lost or doubled is far more.
        torch.testing.assert_close(parameters, START - (given_away - unsent), rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["vanilla", "overlap", "sparse", "sparse-overlap"])
@settings(max_examples=max(1, ORDERS // 4), suppress_health_check=[HealthCheck.too_slow])
@given(
    nodes=LAYOUTS,
    seed=st.integers(0, 10**6),
    options=st.fixed_dictionaries(OPTIONS | {"dropping.up": st.just(0.5), "dropping.down": st.sampled_from([None, 0.5])}),
)
def test_when_nobody_has_anything_new_all_come_to_have_the_same(
    mode: str, nodes: list[int], seed: int, options: dict[str, Any]
) -> None:
    found = train(mode, nodes, seed, options, silent=12)
    given_away = sum(gradients(rank, seed).sum(0) for rank in range(len(found)))
    for parameters, owed in found:
        assert not owed.any()
        torch.testing.assert_close(parameters, START - given_away, rtol=0, atol=1e-3)
