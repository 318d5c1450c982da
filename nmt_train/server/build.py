"""The strategies of workers of a server, by cadence. To add a cadence, add a file and a row here."""

from __future__ import annotations

from collections.abc import Callable

from nmt_train.server.downpour import Downpour
from nmt_train.server.easgd import EASGD
from nmt_train.server.every_step import EveryStep
from nmt_train.server.local_sgd import LocalSGD, OverlappedLocalSGD
from nmt_train.server.overlap import Overlap
from nmt_train.strategy.context import BuildContext
from nmt_train.strategy.plan import EVERY_STEP, LOCAL_STEPS, ServerPlan
from nmt_train.strategy.strategy import Strategy


def _local_steps(context: BuildContext, settings: ServerPlan) -> Strategy:
    if settings.local.outer == "elastic":
        return EASGD(context, settings)
    return (OverlappedLocalSGD if settings.local.delay else LocalSGD)(context, settings)


CADENCES: dict[str, Callable[[BuildContext, ServerPlan], Strategy]] = {
    EVERY_STEP: EveryStep,
    LOCAL_STEPS: _local_steps,
    "overlapped": Overlap,
    "downpour": Downpour,
}
