"""The strategies of replicas, by cadence. To add a cadence, add a file and a row here."""

from __future__ import annotations

from collections.abc import Callable

from nmt_train.replicas.bucketed import Bucketed
from nmt_train.replicas.local_sgd import LocalSGD, OverlappedLocalSGD
from nmt_train.replicas.pipe_sgd import PipeSGD
from nmt_train.replicas.synchronous import Synchronous
from nmt_train.strategy.context import BuildContext
from nmt_train.strategy.plan import EVERY_STEP, LOCAL_STEPS, ReplicasPlan
from nmt_train.strategy.strategy import Strategy


def _every_step(context: BuildContext, settings: ReplicasPlan) -> Strategy:
    return (Bucketed if settings.buckets > 1 else Synchronous)(context, settings)


def _local_steps(context: BuildContext, settings: ReplicasPlan) -> Strategy:
    return (OverlappedLocalSGD if settings.local.delay else LocalSGD)(context, settings)


CADENCES: dict[str, Callable[[BuildContext, ReplicasPlan], Strategy]] = {
    EVERY_STEP: _every_step,
    LOCAL_STEPS: _local_steps,
    "pipelined": PipeSGD,
}
