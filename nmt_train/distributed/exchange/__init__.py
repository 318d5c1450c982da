"""The exchanges: how workers communicate. To add an exchange, add a file here and a row in `EXCHANGES`."""

from nmt_train.distributed.exchange.all_gather import AllGather
from nmt_train.distributed.exchange.all_reduce import AllReduce
from nmt_train.distributed.exchange.exchange import Exchange
from nmt_train.distributed.exchange.low_bit import LowBitAllReduce
from nmt_train.distributed.exchange.parameter_server.client import ParameterServer
from nmt_train.distributed.exchange.powersgd import PowerSGD
from nmt_train.distributed.exchange.single import SingleRank
from nmt_train.distributed.exchange.strom import StromExchange

EXCHANGES: dict[str, type[Exchange]] = {
    "alone": SingleRank,
    "server": ParameterServer,
    "all-reduce": AllReduce,
    "all-gather": AllGather,
    "powersgd": PowerSGD,
    "low-bit": LowBitAllReduce,
    "peers": StromExchange,
}
