"""The schedules: when workers exchange their gradients. To add a schedule, add a file here and a row in `SCHEDULES`."""

from typing import Any

from nmt_train.distributed.schedule.bucketed import Bucketed
from nmt_train.distributed.schedule.downpour import Downpour
from nmt_train.distributed.schedule.easgd import EASGD
from nmt_train.distributed.schedule.every_step import EveryStep
from nmt_train.distributed.schedule.local_sgd import LocalSGD
from nmt_train.distributed.schedule.overlap import Overlap
from nmt_train.distributed.schedule.overlapped_local_sgd import OverlappedLocalSGD
from nmt_train.distributed.schedule.pipe_sgd import PipeSGD
from nmt_train.distributed.schedule.schedule import Schedule

SCHEDULES: dict[str, type[Schedule]] = {
    "every-step": EveryStep,
    "overlapped": Overlap,
    "pipelined": PipeSGD,
    "local-steps": LocalSGD,
    "downpour": Downpour,
}


def chosen(name: str, settings: Any) -> type[Schedule]:
    """The class for a schedule name, or the variant of it that the settings select; settings: the whole configuration."""
    schedule = SCHEDULES[name]
    if schedule is EveryStep and (settings.exchange.buckets or 1) > 1:
        return Bucketed
    if schedule is LocalSGD and settings.local.outer == "elastic":
        return EASGD
    if schedule is LocalSGD and settings.local.delay:
        return OverlappedLocalSGD
    return schedule
