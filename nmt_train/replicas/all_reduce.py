"""All-reduce by one of several algorithms (key replicas.algorithm)."""

from __future__ import annotations

from nmt_train.replicas.butterfly import ButterflyAllReduce
from nmt_train.replicas.collective_all_reduce import CollectiveAllReduce
from nmt_train.replicas.reducer import Reducer
from nmt_train.replicas.ring import RingAllReduce
from nmt_train.strategy.context import BuildContext
from nmt_train.strategy.plan import ReplicasPlan

_ALGORITHMS: dict[str, type[Reducer]] = {
    "ring": RingAllReduce, "butterfly": ButterflyAllReduce, "mpi": CollectiveAllReduce, "torch": CollectiveAllReduce,
}  # fmt: skip


class AllReduce(Reducer):
    """Sums the vectors as they are, or as a codec rounds them."""

    @classmethod
    def build(cls, context: BuildContext, settings: ReplicasPlan) -> Reducer:
        return _ALGORITHMS[settings.algorithm].build(context, settings)
