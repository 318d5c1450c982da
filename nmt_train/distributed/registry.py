"""The schedules and exchanges by name. To add one, add a file to its folder and a row here."""

from __future__ import annotations

from nmt_train.distributed.exchange.all_gather import AllGather
from nmt_train.distributed.exchange.all_reduce import AllReduce
from nmt_train.distributed.exchange.exchange import Exchange
from nmt_train.distributed.exchange.low_bit import LowBitAllReduce
from nmt_train.distributed.exchange.parameter_server.client import ParameterServer
from nmt_train.distributed.exchange.powersgd import PowerSGD
from nmt_train.distributed.exchange.single import SingleRank
from nmt_train.distributed.exchange.strom import StromExchange
from nmt_train.distributed.plan import Plan
from nmt_train.distributed.schedule.bucketed import Bucketed
from nmt_train.distributed.schedule.downpour import Downpour
from nmt_train.distributed.schedule.easgd import EASGD
from nmt_train.distributed.schedule.every_step import EveryStep
from nmt_train.distributed.schedule.local_sgd import LocalSGD
from nmt_train.distributed.schedule.overlap import Overlap
from nmt_train.distributed.schedule.overlapped_local_sgd import OverlappedLocalSGD
from nmt_train.distributed.schedule.pipe_sgd import PipeSGD
from nmt_train.distributed.schedule.schedule import Schedule

EXCHANGES: dict[str, type[Exchange]] = {
    "alone": SingleRank,
    "server": ParameterServer,
    "all-reduce": AllReduce,
    "all-gather": AllGather,
    "powersgd": PowerSGD,
    "low-bit": LowBitAllReduce,
    "peers": StromExchange,
}
SCHEDULES: dict[str, type[Schedule]] = {
    "every-step": EveryStep,
    "overlapped": Overlap,
    "pipelined": PipeSGD,
    "local-steps": LocalSGD,
    "downpour": Downpour,
}


def schedule_of(plan: Plan) -> type[Schedule]:
    """The class of a plan's schedule, or its variant for the plan's settings."""
    schedule = SCHEDULES[plan.schedule]
    if schedule is EveryStep and plan.buckets > 1:
        return Bucketed
    if schedule is LocalSGD and plan.local.outer == "elastic":
        return EASGD
    if schedule is LocalSGD and plan.local.delay:
        return OverlappedLocalSGD
    return schedule
