"""Synchronous data parallelism: all-reduce the gradients, then make the same update on every rank (Arnold Alg. 1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from nmt_train.distributed.context import BuildContext
from nmt_train.distributed.exchange.exchange import UNSENT, Exchange, Vectors
from nmt_train.distributed.exchange.library_all_reduce import LibraryAllReduce
from nmt_train.distributed.exchange.replica_check import compare
from nmt_train.distributed.exchange.ring import Reducer, Reduction, RingAllReduce
from nmt_train.distributed.transport import Transport
from nmt_train.optim.optimizer import Optimizer, clip
from nmt_train.optim.update_optimizers import update_optimizer
from nmt_train.trace import Trace


class AllReduce(Exchange):
    """Each rank holds all parameters and the whole optimizer state; checkpoints save those of rank 0.

    `optimizer` updates the vector that it was created for: with reduced gradients, clipped to clip_norm (0: no clipping), or
    with the mean of finished updates. sums: gradients are summed, not averaged (see optim/gradient_accumulation.py).
    """

    codec_needs = "summable"
    synchronous = in_parts = True

    @classmethod
    def build(cls, context: BuildContext) -> AllReduce:
        return cls._around(context, cls._reducer_of(context))

    @staticmethod
    def _reducer_of(context: BuildContext) -> Reducer:
        """The configured algorithm."""
        algorithm = context.settings.exchange.algorithm
        if algorithm != "ring":
            return LibraryAllReduce(context.transport, algorithm, context.trace)
        return RingAllReduce(context.transport, context.codec(context.mode.up, context.settings.dropping.up), context.trace)

    @classmethod
    def _around(cls, context: BuildContext, reducer: Reducer) -> Self:
        config, parameters = context.settings, context.flat.parameters
        if context.mode.optimizer == "shard":
            optimizer, longest = Optimizer(config.optimizer, parameters), config.optimizer.clip_norm
        else:
            optimizer, longest = update_optimizer(config.local, config.optimizer, parameters.clone()), 0.0
        return cls(context.transport, optimizer, reducer, longest, context.trace, context.sums)

    def __init__(
        self, transport: Transport, optimizer: Optimizer, reducer: Reducer, clip_norm: float, trace: Trace, sums: bool = False
    ) -> None:
        super().__init__(optimizer)
        self._sums = sums and not optimizer.adds_updates
        self.exchanges_updates, self.clips = optimizer.adds_updates, not optimizer.adds_updates
        self._transport, self._reducer, self._clip_norm, self._trace = transport, reducer, clip_norm, trace
        whole, none = slice(0, optimizer.parameters.numel()), slice(0, 0)
        self.initial_slices = [whole] * transport.size
        self.snapshot_slices = [whole] + [none] * (transport.size - 1)

    def sync(self, gradient: Tensor, parameters: Tensor, weight: int = 1) -> None:
        if weight:
            self._pay(UNSENT, gradient)
        with self._trace.span("sync"):
            joined = self.transfer(gradient, weight)
        self.apply(gradient, parameters, joined)

    def transfer(self, gradient: Tensor, weight: int) -> Reduction:
        """The communication half of `sync`: all-reduce the gradient, or a part of it, in place."""
        return self._reducer.reduce(gradient, self.updates, weight)

    @torch.no_grad()
    def apply(self, gradient: Tensor, parameters: Tensor, joined: Reduction) -> None:
        """The update half of `sync`; raises NotFinite, on all ranks alike, if the gradient is infinite or not a number."""
        norm = clip(gradient, self._clip_norm, joined.divisor)
        if self._sums and joined.weight > 1:
            gradient.mul_(joined.weight)
        self.gradient_norm = norm if self.clips else self.gradient_norm
        with self._trace.span("update", self.optimizer.cost_elements):
            self.optimizer.apply(gradient)
        if parameters.data_ptr() != self.optimizer.parameters.data_ptr():
            parameters.copy_(self.optimizer.parameters)

    def worker_state(self) -> Vectors:
        return self._and_owed(self._reducer.worker_state())

    def rescued(self) -> Vectors:
        return self._and_owed(self._reducer.rescued())

    def _and_owed(self, worker_state: Vectors) -> Vectors:
        for name, vector in super().worker_state().items():
            worker_state[name] = worker_state[name] + vector if name in worker_state else vector
        return worker_state

    def load_worker_state(self, vectors: Mapping[str, Tensor]) -> None:
        super().load_worker_state(vectors)
        self._reducer.load_worker_state(vectors)

    def refresh(self, parameters: Tensor) -> None:
        compare(self._transport, self.optimizer.parameters)
        parameters.copy_(self.optimizer.parameters)
