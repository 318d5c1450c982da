"""Sums over all ranks by the wire's own means: an MPI library's all-reduce, or torch.distributed's (NCCL, gloo)."""

from __future__ import annotations

import torch
from torch import Tensor

from nmt_train.exchange.ring import Reducer
from nmt_train.trace import Trace
from nmt_train.wire import Wire
from nmt_train.wire.frame import on_host


class ByWire(Reducer):
    """The library chooses how; it sums in full precision."""

    def __init__(self, wire: Wire, by: str, trace: Trace) -> None:
        self._wire, self._by, self._trace = wire, by, trace

    @torch.no_grad()
    def reduce(self, vector: Tensor, update: int) -> None:
        if self._wire.size > 1:
            held = on_host(vector) if self._by == "mpi" else vector
            with self._trace.span("waiting"):
                self._wire.add_up(held, self._by).result()
            if held.data_ptr() != vector.data_ptr():
                vector.copy_(held)
