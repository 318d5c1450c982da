"""The strategy of a plan."""

from __future__ import annotations

from nmt_train.optim.flat_model import FlatModel
from nmt_train.replicas import build as replicas
from nmt_train.server import build as server
from nmt_train.strategy.alone import Alone
from nmt_train.strategy.context import BuildContext
from nmt_train.strategy.plan import PeersPlan, Plan, ReplicasPlan, ServerPlan
from nmt_train.strategy.strategy import Strategy
from nmt_train.strategy.strom import Strom
from nmt_train.trace import Trace
from nmt_train.transport import Transport


def build(plan: Plan, flat: FlatModel, transport: Transport, trace: Trace) -> Strategy:
    """Build the objects with which one rank takes part in the plan."""
    context = BuildContext(plan, flat, transport, trace)
    match plan.family:
        case ReplicasPlan() as settings:
            return replicas.CADENCES[settings.cadence](context, settings)
        case ServerPlan() as settings:
            return server.CADENCES[settings.cadence](context, settings)
        case PeersPlan() as settings:
            return Strom(context, settings)
        case _:
            return Alone(context)
