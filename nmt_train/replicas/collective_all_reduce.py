"""All-reduce by a library that the transport calls: MPI, or torch.distributed (NCCL, gloo)."""

from __future__ import annotations

import torch
from torch import Tensor

from nmt_train.replicas.reducer import Reducer, Reduction
from nmt_train.strategy.context import BuildContext
from nmt_train.strategy.plan import ReplicasPlan
from nmt_train.trace import Trace
from nmt_train.transport import Messages
from nmt_train.transport.mpi.framing import on_host

# The codecs whose elements a library can sum.
SUMS = {"mpi": ("dense",), "torch": ("dense", "bf16")}


class CollectiveAllReduce(Reducer):
    """The library chooses the algorithm."""

    def __init__(self, transport: Messages, by: str, codec: str, trace: Trace) -> None:
        self._transport, self._by, self._trace = transport, by, trace
        self._type = torch.bfloat16 if codec == "bf16" else torch.float32

    @classmethod
    def build(cls, context: BuildContext, settings: ReplicasPlan) -> Reducer:
        return cls(context.transport, settings.algorithm, settings.codec, context.trace)

    @torch.no_grad()
    def reduce(self, vector: Tensor, update: int, weight: int = 1) -> Reduction:
        if self._transport.size == 1:
            return Reduction(1.0, weight)
        if weight != 1:
            vector.mul_(weight)
        held = on_host(vector) if self._by == "mpi" else vector.to(self._type)
        total = torch.tensor([float(weight)], dtype=torch.float64)
        with self._trace.span("waiting"):
            # The weights are added up on the hosts, so that no device is waited for.
            for added in [self._transport.add_up(total), self._transport.add_up(held, self._by)]:
                added.result()
        if held.data_ptr() != vector.data_ptr():
            vector.copy_(held)
        return Reduction(max(1.0, float(total)), int(total))
