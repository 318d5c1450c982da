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


class CollectiveAllReduce(Reducer):
    """The library chooses the algorithm; it sums in full precision."""

    def __init__(self, transport: Messages, by: str, trace: Trace) -> None:
        self._transport, self._by, self._trace = transport, by, trace

    @classmethod
    def build(cls, context: BuildContext, settings: ReplicasPlan) -> Reducer:
        return cls(context.transport, settings.algorithm, context.trace)

    @torch.no_grad()
    def reduce(self, vector: Tensor, update: int, weight: int = 1) -> Reduction:
        if self._transport.size == 1:
            return Reduction(1.0, weight)
        if weight != 1:
            vector.mul_(weight)
        held = on_host(vector) if self._by == "mpi" else vector
        total = torch.tensor([float(weight)], dtype=torch.float64, device="cuda" if held.is_cuda else "cpu")
        with self._trace.span("waiting"):
            for added in [self._transport.add_up(addend, self._by) for addend in (held, total)]:
                added.result()
        if held.data_ptr() != vector.data_ptr():
            vector.copy_(held)
        return Reduction(max(1.0, float(total)), int(total))
