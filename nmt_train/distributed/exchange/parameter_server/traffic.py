"""What workers and shards send each other, as set by the mode and the configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from nmt_train.distributed.codec import CODECS
from nmt_train.distributed.codec.codec import Codec
from nmt_train.distributed.context import BuildContext
from nmt_train.distributed.exchange.parameter_server.update_rules import RULES, UpdateRule
from nmt_train.optim.optimizer import Optimizer
from nmt_train.optim.update_optimizers import UpdateAdder


@dataclass(frozen=True)
class Traffic:
    """What workers push, how shards apply it, and what they answer; the same on all ranks.

    optimizer: creates the optimizer of a shard's parameters.
    up: creates the codec of pushes. down: creates the codec of deltas (None: shards send parameters). feedback: pushes use
    error feedback. exchanges_updates: workers push finished updates, and shards add them up. prepares: `prepare`, not the
    schedule, turns gradients into updates. delay: how many answers a worker has received since the parameters that a gradient
    was computed on: 1 if exchanges overlap with computation, else 0. sums: gradients are summed, not
    averaged.
    """

    optimizer: Callable[[Tensor], Optimizer]
    up: Callable[[], Codec]
    down: Callable[[], Codec] | None
    feedback: bool
    rule: UpdateRule
    exchanges_updates: bool = False
    prepares: bool = True
    delay: int = 0
    sums: bool = False

    @classmethod
    def build(cls, context: BuildContext) -> Traffic:
        plan = context.plan
        rule = RULES[plan.server.rule].build(plan.server.bundle, plan.server.backup)
        arrivals = 0 if rule.holds else max(1, plan.workers // plan.server.bundle)

        def optimizer(parameters: Tensor) -> Optimizer:
            if not plan.sends_updates:
                return Optimizer(plan.optimizer, parameters)
            if not plan.local_steps:
                return UpdateAdder(plan.optimizer, parameters)
            return plan.outer_optimizer(parameters, arrivals)

        return cls(
            optimizer=optimizer,
            up=context.up,
            down=None if CODECS[plan.down].lossless else context.down,
            feedback=context.up().biased,
            rule=rule,
            exchanges_updates=plan.sends_updates,
            prepares=not plan.local_steps,
            delay=context.max_in_flight,
            sums=plan.sums,
        )
