"""Workers whose gradients pull the parameters, each to a target of its own: small enough to be followed by hand."""

from __future__ import annotations

from typing import Any

import torch
from conftest import small
from torch import Tensor, nn
from virtual import engine, together

from nmt_train import config as configuration
from nmt_train.config import Config
from nmt_train.modes.build import build
from nmt_train.modes.resolve import resolve
from nmt_train.optim.flat_model import FlatModel
from nmt_train.simulation.virtual_transport import VirtualTransport
from nmt_train.strategy.strategy import Strategy
from nmt_train.trace import Trace
from nmt_train.transport import Transport

START = torch.tensor([1.0, -2.0, 3.0, 0.5, -0.25])
RATE = 0.125
# What makes mode diloco-async plain local SGD by a server.
BY_SERVER = {"local.outer": "none", "server.up": "dense", "server.down": "dense"}


class Vector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(START.clone())


def target(rank: int) -> Tensor:
    return torch.arange(5.0) * (rank + 1)


def settings(mode: str, options: dict[str, Any]) -> Config:
    """Plain descent by RATE, but for `options` by dotted keys."""
    values = small("unused", "unused") | {"mode": mode}  # type: ignore[arg-type]
    values["optimizer"] = {"name": "sgd", "learning_rate": RATE, "schedule": "constant", "warmup": 0, "clip_norm": 0}
    for name, value in options.items():
        section, key = name.split(".")
        values.setdefault(section, {})[key] = value
    return configuration.validate(values, {})


def strategy_of(config: Config, flat: FlatModel, transport: Transport) -> Strategy:
    return build(resolve(config, transport.nodes), flat, transport, Trace(False, transport))


def trained(mode: str, nodes: list[int], steps: int, options: dict[str, Any] | None = None) -> list[list[Tensor]]:
    """Of every rank its parameters before each step, and after it was drained at the end."""
    chosen, room = settings(mode, options or {}), engine(nodes)

    def work(transport: VirtualTransport) -> list[Tensor]:
        flat = FlatModel(Vector())
        strategy = strategy_of(chosen, flat, transport)
        strategy.refresh()
        seen = []
        for _ in range(steps):
            seen.append(flat.parameters.clone())
            transport.spend("forward", 1)
            flat.gradient.add_(flat.parameters - target(transport.rank), alpha=strategy.accumulator.add(1))
            strategy.step()
        strategy.drain()
        return [*seen, flat.parameters.clone()]

    return together(room, *[work] * len(room.transports))
