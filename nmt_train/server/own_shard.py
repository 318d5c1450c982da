"""The shard that a rank serves, as its plan says."""

from __future__ import annotations

from collections.abc import Sequence

from nmt_train.codec import CODECS
from nmt_train.codec.codec import Codec
from nmt_train.optim.optimizer import Optimizer
from nmt_train.optim.update_optimizers import UpdateAdder
from nmt_train.server.nodes import dense_ranks
from nmt_train.server.replication import Replication
from nmt_train.server.service import ShardService
from nmt_train.server.shard import Shard
from nmt_train.strategy.context import BuildContext
from nmt_train.strategy.local_steps import outer_optimizer
from nmt_train.strategy.plan import ServerPlan
from nmt_train.strategy.update_rules import RULES, UpdateRule


def serve(context: BuildContext, settings: ServerPlan, shards: Sequence[slice], max_in_flight: int) -> ShardService:
    """Serve this rank's slice of the parameters. shards: the slice of every rank. max_in_flight: see `Strategy`."""
    plan, transport = context.plan, context.transport
    rule = RULES[settings.rule].build(settings.bundle, settings.backup)
    recovers = transport.fault_tolerant and transport.size > 1
    replication = Replication(transport, shards, plan.recovery) if recovers else None
    optimizer = _optimizer(context, settings, rule, shards[transport.rank])
    sums = plan.sums or settings.sends_updates  # finished updates are each applied in full, unless the rule takes their mean
    up, down = up_codec(context, settings), down_codec(context, settings)
    near = dense_ranks(transport.rank, transport.nodes, settings.bypass)
    shard = Shard(optimizer, up, down, rule, max_in_flight, settings.keeps_own, sums, near)
    return ShardService(shard, transport, context.trace, replication)


def _optimizer(context: BuildContext, settings: ServerPlan, rule: UpdateRule, shard: slice) -> Optimizer:
    plan, parameters = context.plan, context.flat.parameters[shard].clone()
    if not settings.sends_updates:
        mine = [matrix for matrix in context.flat.matrices() if shard.start <= matrix.start < shard.stop]
        return Optimizer(plan.optimizer, parameters, [matrix.in_part(shard.start) for matrix in mine])
    if not settings.local_steps:
        return UpdateAdder(plan.optimizer, parameters)
    arrivals = 0 if rule.holds else max(1, plan.workers // settings.bundle)
    return outer_optimizer(settings.local, plan.optimizer, parameters, arrivals)


def up_codec(context: BuildContext, settings: ServerPlan) -> Codec:
    """A new codec of pushes."""
    return context.codec(settings.up, context.plan.dropped_up)


def down_codec(context: BuildContext, settings: ServerPlan) -> Codec | None:
    """A new codec of deltas; None: shards send parameters."""
    return None if CODECS[settings.down].lossless else context.codec(settings.down, settings.dropped_down)
