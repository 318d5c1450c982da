"""What a strategy or a client is created from, for tests of one of them."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn

from nmt_train import config as configuration
from nmt_train.modes import resolve as modes
from nmt_train.modes.table import Mode, Peers, Replicas, Server
from nmt_train.optim.config import OptimizerConfig
from nmt_train.optim.flat_model import FlatModel
from nmt_train.server.client import Client
from nmt_train.server.per_node import PerNode
from nmt_train.strategy.alone import Alone
from nmt_train.strategy.context import BuildContext
from nmt_train.strategy.plan import ServerPlan
from nmt_train.trace import Trace

_NEEDED = {"corpus": {"train": ["source", "target"], "valid": ["source", "target"]}, "stop": {"after": "1u"}}
_SERVER = Server()


class Vector(nn.Module):
    """A model whose parameters are one vector."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values.clone())


def context(
    transport: Any, model: Tensor | FlatModel, family: Server | Replicas | Peers = _SERVER, **sections: Any
) -> BuildContext:
    """For one of several workers. sections: of the configuration, such as optimizer=OptimizerConfig(...)."""
    mode, flat = Mode(family, "these tests"), model if isinstance(model, FlatModel) else FlatModel(Vector(model))
    config = dataclasses.replace(configuration.validate(_NEEDED, {}), **sections)
    plan = dataclasses.replace(modes._plan(config, mode, transport.nodes, modes._Values(mode)), workers=1)
    if isinstance(family, Server) and isinstance(plan.family, ServerPlan) and family.optimizer == "worker":
        plan = dataclasses.replace(plan, family=dataclasses.replace(plan.family, sends_updates=True))
    return BuildContext(plan, flat, transport, Trace(False, transport))


def client(made_of: BuildContext, max_in_flight: int = 0, kind: type[Client] = Client) -> Client:
    assert isinstance(made_of.plan.family, ServerPlan)
    return (PerNode if made_of.plan.per_node else kind)(made_of, made_of.plan.family, max_in_flight)


def alone(transport: Any, parameters: Tensor, optimizer: OptimizerConfig, **sections: Any) -> Alone:
    return Alone(context(transport, parameters, optimizer=optimizer, **sections))
