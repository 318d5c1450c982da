"""What an exchange or a schedule is created from, for tests of one of them."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn

from nmt_train import config as configuration
from nmt_train.distributed.context import BuildContext
from nmt_train.modes import resolve as modes
from nmt_train.modes.table import Mode
from nmt_train.optim.flat_model import FlatModel
from nmt_train.trace import Trace

_NEEDED = {"corpus": {"train": ["source", "target"], "valid": ["source", "target"]}, "stop": {"after": "1u"}}


class Vector(nn.Module):
    """A model whose parameters are one vector."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values.clone())


def context(
    transport: Any, model: Tensor | FlatModel, up: str = "dense", down: str = "dense", optimizer_at: str = "shard",
    schedule_updates: bool = False, max_in_flight: int = 0, exchange: str = "server", **sections: Any,
) -> BuildContext:  # fmt: skip
    """sections: of the configuration, such as optimizer=OptimizerConfig(...)."""
    row = Mode("every-step", exchange, up, down, "these tests", optimizer=optimizer_at)
    config = dataclasses.replace(configuration.validate(_NEEDED, {}), **sections)
    flat = model if isinstance(model, FlatModel) else FlatModel(Vector(model))
    plan = modes._plan(config, row, transport.nodes, modes._Values(row))
    plan = dataclasses.replace(plan, workers=1, sends_updates=optimizer_at == "worker", local_steps=schedule_updates)
    return BuildContext(plan, flat, transport, Trace(False, transport), max_in_flight)
