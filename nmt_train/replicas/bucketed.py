"""Exchange after every step, in buckets: a worker sends gradients of later layers while it computes those of earlier ones.

As in Li et al. 2020 (PyTorch Distributed, 3.2.3): a worker sends a bucket when the backward pass has computed all its
gradients, and the buckets in the same order as all other workers.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nmt_train.optim.flat_model import add
from nmt_train.replicas.reducer import Reduction
from nmt_train.replicas.synchronous import Synchronous
from nmt_train.strategy.background import BackgroundTask, Stages
from nmt_train.strategy.context import BuildContext
from nmt_train.strategy.plan import ReplicasPlan
from nmt_train.strategy.state import WorkerState


class Bucketed(Synchronous):
    """Sends buckets of about equal size, usually from the end of the vector, where the last layers are, to its beginning.

    The gradient of a tied embedding is complete only when the backward pass ends, because of the lookups of words; the part of
    the output layer is the first to be computed. With `late_lookups`, the part of the lookups is left for the next exchange,
    and the buckets of the embedding are sent first. Of several accumulated steps, only the last has late lookups.

    If tasks cannot run while another task computes, as on a simulated clock, the worker sends the buckets after the backward
    pass, each after the share of the time of the pass after which it would be complete (see `_time_shares`).
    """

    def __init__(self, context: BuildContext, settings: ReplicasPlan) -> None:
        super().__init__(context, settings)
        late = settings.late_lookups and context.plan.tied and context.transport.size > 1
        elements = self._flat.gradient.numel()
        # The gradient of the newest lookups (empty if lookups are not late); and whether an older one was not finite.
        self._lookups = self._flat.separate_lookups() if late else self._flat.gradient.new_zeros(0)
        self._lookups_not_finite, early = False, self._lookups.numel()
        buckets = self._reducer.parts(elements, settings.buckets)
        self._buckets = sorted(buckets, key=lambda place: (place.stop > early, -place.start))
        self._time_shares = _time_shares(self._flat.layout, self._buckets, early)
        self._waiting = deque[slice]()  # buckets of this exchange that have not been sent
        self._missing: dict[int, int] = {}  # by the start of each bucket: elements still to be computed
        self._begun = False  # whether buckets of this exchange may have been sent
        self._weight = 0  # weight of the gradient of this exchange
        self._background = BackgroundTask(context.transport, self._trace, self._stages, len(self._buckets))
        if context.transport.parallel:
            self._flat.watch(self._computed)

    def backward(self, loss: Tensor, tokens: int) -> None:
        if self._accumulated + 1 < self._accumulate:
            super().backward(loss, tokens)
            self._flat.gradient[: self._lookups.numel()] += self._lookups
            self._lookups.zero_()
            return
        factor = self.accumulator.add(tokens)
        divisor = self._begin()
        shares = iter(self._time_shares)
        with self._trace.span("backward", tokens, 1 / next(shares)):
            self._flat.backward(loss if factor == divisor else loss * (factor / divisor))
        for share in shares:
            if self._waiting:
                self._send_next()
            if share and self._waiting:  # already computed; a simulated clock advances here
                with self._trace.span("backward", tokens, 1 / share):
                    pass

    def _begin(self) -> float:
        """Begin an exchange, perhaps before the last gradient is computed; returns the divisor that makes the sum the mean."""
        self._begun = True
        divisor, self._weight = self._prepare()
        if self._lookups_not_finite and self._weight:  # all workers alike drop this exchange, and say so
            self._flat.gradient[0], self._lookups_not_finite = torch.nan, False
        self._waiting.extend(self._buckets)
        self._missing = {bucket.start: bucket.stop - bucket.start for bucket in self._buckets}
        return divisor

    def _computed(self, place: slice) -> None:
        """Called when the gradient of one parameter is complete: sends the buckets that are now complete."""
        for bucket in self._waiting:
            self._missing[bucket.start] -= max(0, min(bucket.stop, place.stop) - max(bucket.start, place.start))
        while self._waiting and not self._missing[self._waiting[0].start]:
            self._send_next()

    def _send_next(self) -> None:
        bucket = self._waiting.popleft()
        self._background.give(self._flat.gradient[bucket], self._weight, self.updates, bucket.start)

    def _stages(self, part: Tensor, weight: int, update: int, start: int) -> Stages[Reduction]:
        """Reduce a part of the gradient, which begins at `start`, in the stages of the reducer."""
        stages = self._reducer.stages(part, update, weight, start)
        while True:
            with self._trace.span("sync"):
                try:
                    next(stages)
                except StopIteration as end:
                    return end.value
            yield

    def _exchange(self) -> None:
        if not self._begun:  # the last step had no batch, or was not known to be the last
            self._begin()
        while self._waiting:
            self._send_next()
        with self._trace.span("sync"):
            while self._background.under_way:
                _, joined = self._background.take()
        self._begun = False
        try:
            self._apply(self._flat.gradient, joined)
            if self._lookups.numel():
                self._leave_lookups()
        finally:
            self._lookups.zero_()

    def _leave_lookups(self) -> None:
        """Leave their gradient for the next exchange."""
        lookups = self._lookups
        if lookups.is_meta or math.isfinite(torch.linalg.vector_norm(lookups)):
            if not self._reducer.add_late(lookups):
                self._owe(lookups)
        else:
            self._lookups_not_finite = True
        with self._trace.span("swap", lookups.numel()):
            pass  # charged only now, because a simulated worker may end here

    def _owe(self, lookups: Tensor) -> None:
        """Add gradients of the first elements to the debt, which the next gradient includes."""
        owed = self._debt.residual
        if owed is None:
            self._debt.residual = lookups.clone()
        else:  # this worker had no batch, so it still owes older ones
            add(owed[: lookups.numel()], lookups, out=owed[: lookups.numel()])

    def state(self) -> WorkerState:
        state, elements = super().state(), self._flat.gradient.numel()
        if state.residual is not None and state.residual.numel() < elements:
            rest = state.residual.new_zeros(elements - state.residual.numel())
            state = replace(state, residual=torch.cat([state.residual, rest]))
        return state


def _time_shares(layout: Sequence[tuple[str, tuple[int, ...]]], buckets: Sequence[slice], early: int = 0) -> list[float]:
    """What share of a backward pass passes between the completion of one bucket and the next (the first: since its beginning).

    A matrix is assumed to take as long as it has elements. The first one, the embedding of target words, is also the output
    layer, as far as they are tied: it is computed first, but complete only when the pass ends. early: how many
    elements, from the beginning of the vector, do not wait for lookups.
    """
    elements = max(bucket.stop for bucket in buckets)
    first = early or (math.prod(layout[0][1]) if len(layout[0][1]) > 1 else 0)

    def complete(bucket: slice) -> float:
        if bucket.stop <= early:
            return first / elements
        return 1.0 if bucket.start < first else (elements - bucket.start + first) / elements

    return [end - begin for begin, end in itertools.pairwise([0.0, *map(complete, buckets)])]
