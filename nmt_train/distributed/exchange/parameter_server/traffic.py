"""What workers and shards send each other, as set by the mode and the configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from nmt_train.distributed.codec import CODECS
from nmt_train.distributed.codec.codec import Codec
from nmt_train.distributed.codec.topk import dropped_down
from nmt_train.distributed.context import BuildContext
from nmt_train.distributed.exchange.parameter_server.update_rules import RULES, UpdateRule
from nmt_train.optim.optimizer import Optimizer
from nmt_train.optim.update_optimizers import UpdateAdder, update_optimizer


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
        settings, mode = context.settings, context.mode
        dropping, exchanges_updates = settings.dropping, mode.optimizer == "worker"
        feedback = context.codec(mode.up, dropping.up).biased
        dropped = dropped_down(dropping, mode.workers - settings.exchange.knows_own(exchanges_updates, feedback))
        rule = RULES[settings.exchange.rule or "async"].build(settings.exchange)
        arrivals = 0 if rule.holds else max(1, mode.workers // (settings.exchange.bundle or 1))

        def optimizer(parameters: Tensor) -> Optimizer:
            if not exchanges_updates:
                return Optimizer(settings.optimizer, parameters)
            if not context.schedule_updates:
                return UpdateAdder(settings.optimizer, parameters)
            return update_optimizer(settings.local, settings.optimizer, parameters, arrivals)

        return cls(
            optimizer=optimizer,
            up=lambda: context.codec(mode.up, dropping.up),
            down=None if CODECS[mode.down].lossless else lambda: context.codec(mode.down, dropped),
            feedback=feedback,
            rule=rule,
            exchanges_updates=exchanges_updates,
            prepares=not context.schedule_updates,
            delay=context.max_in_flight,
            sums=context.sums,
        )
