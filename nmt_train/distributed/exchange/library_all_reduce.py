"""Sums over all ranks by the wire's own means: an MPI library's all-reduce, or torch.distributed's (NCCL, gloo)."""

from __future__ import annotations

import torch
from torch import Tensor

from nmt_train.distributed.exchange.ring import Joined, Reducer
from nmt_train.distributed.transport import Wire
from nmt_train.distributed.transport.mpi.framing import on_host
from nmt_train.trace import Trace


class ByWire(Reducer):
    """The library chooses how; it sums in full precision."""

    def __init__(self, wire: Wire, by: str, trace: Trace) -> None:
        self._wire, self._by, self._trace = wire, by, trace

    @torch.no_grad()
    def reduce(self, vector: Tensor, update: int, weight: int = 1) -> Joined:
        if self._wire.size == 1:
            return Joined(1.0, weight)
        if weight != 1:
            vector.mul_(weight)
        held = on_host(vector) if self._by == "mpi" else vector
        total = torch.tensor([float(weight)], dtype=torch.float64, device=held.device if not held.is_meta else None)
        with self._trace.span("waiting"):
            for added in [self._wire.add_up(addend, self._by) for addend in (held, total)]:
                added.result()
        if held.data_ptr() != vector.data_ptr():
            vector.copy_(held)
        return Joined(max(1.0, float(total)), int(total))
