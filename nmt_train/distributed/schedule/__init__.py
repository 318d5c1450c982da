"""When workers exchange their gradients. A new schedule is a file here and a row of `SCHEDULES`."""

from typing import Any

from nmt_train.distributed.schedule.bucketed import Bucketed
from nmt_train.distributed.schedule.downpour import Downpour
from nmt_train.distributed.schedule.easgd import EASGD
from nmt_train.distributed.schedule.every_step import EveryStep
from nmt_train.distributed.schedule.local_sgd import LocalSGD
from nmt_train.distributed.schedule.overlap import Overlap
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
    """The class of a schedule, as settings vary it; settings: the whole configuration."""
    schedule = SCHEDULES[name]
    if schedule is EveryStep and (settings.exchange.buckets or 1) > 1:
        return Bucketed
    if schedule is LocalSGD and settings.local.outer == "elastic":
        return EASGD
    return schedule
