"""Synchronous data parallelism: all-reduce the gradients, then update all replicas alike (Arnold 2016, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from nmt_train.distributed.background import Stages, finish
from nmt_train.distributed.context import BuildContext
from nmt_train.distributed.exchange.butterfly import ButterflyAllReduce
from nmt_train.distributed.exchange.collective_all_reduce import CollectiveAllReduce
from nmt_train.distributed.exchange.exchange import Exchange, replicated
from nmt_train.distributed.exchange.reducer import Reducer, Reduction
from nmt_train.distributed.exchange.replica_check import compare
from nmt_train.distributed.exchange.ring import RingAllReduce
from nmt_train.distributed.exchange.worker_state import UNSENT, Vectors
from nmt_train.optim.optimizer import Optimizer, clip

_OURS = {"ring": RingAllReduce, "butterfly": ButterflyAllReduce}  # the others are algorithms of libraries


class AllReduce(Exchange):
    """Each rank holds all parameters and the whole optimizer state; checkpoints save those of rank 0.

    `optimizer` updates the worker's parameters with clipped gradients, or a copy of them with the mean of finished updates.
    """

    codec_needs = "summable"
    synchronous = True
    late_lookups = False  # whether the gradients of lookups in a tied embedding may come one exchange late, by `add_late`
    buckets = 8  # with more, the first one is sent earlier; 8 are as fast as DDP (docs/benchmarks.md)

    def __init__(self, context: BuildContext) -> None:
        plan, parameters = context.plan, context.flat.parameters
        self.exchanges_updates = plan.sends_updates
        self.clips = not self.exchanges_updates
        super().__init__(Optimizer(plan.optimizer, parameters) if self.clips else plan.outer_optimizer(parameters.clone()))
        self._clip_norm = plan.optimizer.clip_norm if self.clips else 0.0
        self._sums = plan.sums and self.clips
        self._adds_up = self.exchanges_updates and plan.local.outer == "sum"
        self._share = 1 / context.transport.size if self.exchanges_updates and not self._adds_up else 1.0
        self._carried_share = self._share  # the share of a vector that the parameters receive if all workers contribute
        self._transport, self._trace, self._reducer = context.transport, context.trace, self._make_reducer(context)
        self.initial_slices, self.snapshot_slices = replicated(parameters.numel(), context.transport.size)

    def _make_reducer(self, context: BuildContext) -> Reducer:
        """The configured algorithm."""
        algorithm = context.plan.algorithm
        if algorithm not in _OURS:
            return CollectiveAllReduce(context.transport, algorithm, context.trace)
        return _OURS[algorithm](context.transport, context.up(), context.trace)

    def sync(self, gradient: Tensor, parameters: Tensor, weight: int = 1) -> None:
        self.begin(gradient, parameters, weight)()

    def begin(self, gradient: Tensor, parameters: Tensor, weight: int = 1) -> Callable[[], None]:
        carried = self._carried_over.pop(UNSENT, None) if weight else None
        if carried is not None:  # it is to be added to the parameters, and a mean takes only a share
            gradient.add_(carried, alpha=1 / self._carried_share)
        joined = self.transfer(gradient, weight, self.updates)
        taken = 1.0 if self._share == 1.0 else 1 / (joined.weight * self._share or 1.0)
        if carried is not None and taken != 1.0 and self._reducer.residual is None:
            # In a mean over fewer workers, each has a larger share: the next exchange takes back what was added too much.
            self._carried_over[UNSENT] = carried * (1 - taken)
        return lambda: self.apply(gradient, parameters, joined)

    def parts(self, most: int) -> list[slice]:
        """At most `most` slices of the vector that can be transferred one by one; together, they are the whole vector."""
        count = self.optimizer.parameters.numel()
        parts = min(most, count)
        return [slice(count * part // parts, count * (part + 1) // parts) for part in range(parts)]

    def transfer(self, gradient: Tensor, weight: int, update: int, start: int = 0) -> Reduction:
        """All-reduce the gradient, or the part of it that begins at `start`, in place.

        update: a number of updates that is the same on all ranks.
        """
        return finish(self.stages(gradient, weight, update, start))

    def stages(self, gradient: Tensor, weight: int, update: int, start: int = 0) -> Stages[Reduction]:
        """`transfer` in stages; between them, other parts of the same gradient may be transferred."""
        stages = self._reducer.stages(gradient, update, weight, start)
        while True:
            with self._trace.span("sync"):
                try:
                    next(stages)
                except StopIteration as end:
                    return end.value
            yield

    def add_late(self, gradient: Tensor) -> None:
        """Add a gradient of the first elements, which came too late for this exchange, to the next one."""
        raise AssertionError("an exchange without late_lookups")

    @torch.no_grad()
    def apply(self, gradient: Tensor, parameters: Tensor, joined: Reduction) -> None:
        """Update by the all-reduced gradient. Raises NotFinite, on all ranks alike, if it contains infinities or NaN."""
        norm = clip(gradient, self._clip_norm, 1.0 if self._adds_up else joined.divisor)
        if self._sums and joined.weight > 1:
            gradient.mul_(joined.weight)
        self.gradient_norm = norm if self.clips else self.gradient_norm
        with self._trace.span("update", self.optimizer.cost_elements):
            self.optimizer.apply(gradient)
        if parameters.data_ptr() != self.optimizer.parameters.data_ptr():
            parameters.copy_(self.optimizer.parameters)

    def contribution(self, vector: Tensor) -> Tensor:
        return self._shared(vector)

    def _shared(self, vector: Tensor) -> Tensor:
        """What a residual or a message of this rank adds to the parameters. A share is in fp64, so that it is exact."""
        return vector if self._share == 1.0 else vector.double() * self._share

    def worker_state(self) -> Vectors:
        return self._reducer.worker_state() | self.rescued()

    def rescued(self) -> Vectors:
        residual = self._reducer.residual
        return super().worker_state() | ({} if residual is None else {self._residual_name: self._shared(residual)})

    def load_worker_state(self, vectors: Mapping[str, Tensor]) -> None:
        super().load_worker_state(vectors)
        self._reducer.load_worker_state(vectors)
        residual = self._reducer.residual
        if residual is not None:
            self._carried_over.pop(self._residual_name, None)  # the reducer adds it, so the next vector does not include it
            residual.zero_()
            if self._residual_name in vectors:
                residual.copy_(vectors[self._residual_name].double() / self._share)

    def refresh(self, parameters: Tensor) -> None:
        compare(self._transport, self.optimizer.parameters)
        parameters.copy_(self.optimizer.parameters)
