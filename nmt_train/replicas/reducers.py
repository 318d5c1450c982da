"""The reducers by name. To add one, add a file and a row here."""

from __future__ import annotations

from nmt_train.replicas.all_gather import GatherReducer
from nmt_train.replicas.all_reduce import AllReduce
from nmt_train.replicas.low_bit import LowBitReducer
from nmt_train.replicas.powersgd import LowRankReducer
from nmt_train.replicas.reducer import Reducer

REDUCERS: dict[str, type[Reducer]] = {
    "all-reduce": AllReduce,  # type: ignore[type-abstract]
    "all-gather": GatherReducer,
    "powersgd": LowRankReducer,
    "low-bit": LowBitReducer,
}
