"""Schedules: when a worker exchanges its gradients, and what a schedule can be combined with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from nmt_train.distributed.context import BuildContext
from nmt_train.distributed.exchange.exchange import Exchange
from nmt_train.distributed.exchange.worker_state import Vectors
from nmt_train.optim.gradient_accumulation import GradientAccumulator

RECEIVED = "worker.received"  # name, in a worker's state, of the parameters that it last received


class Schedule(ABC):
    """Decides when a worker exchanges. exchange: what it exchanges with. steps: steps[n] exchanges covered n steps each.

    Class attributes say what a schedule can be combined with.
    accumulates: batch.accumulate applies to it.
    one_call: it sends and receives in one call, so that another rank can do both for it.
    in_parts: parts of a gradient may be sent separately. updates: it turns gradients into finished updates.

    max_in_flight: how many exchanges may be in flight when `step` returns, and thus while the next gradient is computed.
    mid_accumulation: the next step continues what earlier steps have begun: a sum of gradients, or a series of local steps.
    endless: it exchanges only when it is drained. received: the parameters that the exchange updates. Only the exchange changes
    them, because they are its record of what the worker has received; a schedule with local steps has others of its own.
    """

    accumulates: ClassVar[bool] = False
    one_call: ClassVar[bool] = True
    in_parts: ClassVar[bool] = False
    updates: ClassVar[bool] = False
    max_in_flight: int = 0
    endless: bool = False

    def __init__(self, context: BuildContext, exchange: Exchange) -> None:
        self.exchange, self.steps = exchange, Counter[int]()
        self._flat, self._trace = context.flat, context.trace
        self._clip_norm = context.plan.optimizer.clip_norm
        self.received = self._flat.parameters
        self.accumulator = GradientAccumulator(context.plan.sums)
        self._restored = False  # whether `load_worker_state` restored `received`

    @property
    def mid_accumulation(self) -> bool:
        return False

    @property
    def unsettled(self) -> int:
        """How many of the last exchanges may be lost if ranks end."""
        return self.max_in_flight + self.exchange.unacknowledged

    @property
    def learning_rate(self) -> float:
        """The learning rate of the last update that the worker knows of."""
        return self.exchange.optimizer.learning_rate

    def backward(self, loss: Tensor, tokens: int) -> None:
        """Add a batch's gradient to the flat gradient, parts of which may be sent as soon as they are complete.

        tokens: the number of target tokens in the batch.
        """
        factor = self.accumulator.add(tokens)
        with self._trace.span("backward", tokens):
            (loss if factor == 1.0 else loss * factor).backward()

    @abstractmethod
    def step(self) -> bool:
        """Called after a batch's gradient was added to the flat one; returns True if it has exchanged gradients.

        A pipeline returns True if it has applied an older sum. Raises NotFinite if the gradient is not finite. The gradient is
        then dropped; training can continue with the next batch.
        """

    def skip(self) -> bool:
        """Called instead of `step` if this worker had no batch but other workers had one."""
        return self.step()

    @abstractmethod
    def drain(self) -> None:
        """Exchange what has accumulated, and finish everything in flight. Called on the order *drain* and at the end."""

    def refresh(self) -> None:
        """Copy exactly the global parameters to this worker. Called while every worker is drained."""
        self.exchange.refresh(self.received)
        self._start_from_received()

    def _start_from_received(self) -> None:
        """Set the parameters of the model to the received ones."""
        if self._flat.parameters is not self.received:
            self._flat.parameters.copy_(self.received)

    def settle(self) -> None:
        """Prepare for a snapshot while all workers are drained. If the exchange `keeps`, the worker keeps its parameters."""
        if self.exchange.keeps:
            self.exchange.settle(self.received)
        else:
            self.refresh()

    def begin(self) -> None:
        """Begin with the restored `received`, if `load_worker_state` found it; otherwise with the global parameters."""
        if self._restored:
            self.exchange.restore(self.received)
        else:
            self.refresh()

    def worker_state(self) -> Vectors:
        """The vectors (elements,) that a drained worker keeps."""
        return self.exchange.worker_state() | self.own_state() | ({RECEIVED: self.received} if self.exchange.keeps else {})

    def own_state(self) -> Vectors:
        """The schedule's own part of `worker_state`."""
        return {}

    def rescued(self) -> Vectors:
        """`worker_state` of an interrupted worker, without the parameters that it had received."""
        return self.exchange.rescued() | self.own_state()

    def in_doubt(self) -> Vectors:
        """Vectors to be sent again if no rank has made more updates than this one; otherwise those updates include them."""
        return {}

    def load_worker_state(self, vectors: Mapping[str, Tensor]) -> None:
        """Continue with what `worker_state` returned."""
        self.exchange.load_worker_state(vectors)
        self._restored = self.exchange.keeps and RECEIVED in vectors and self.exchange.knows(vectors)
        if self._restored:
            self.received.copy_(vectors[RECEIVED])
            self._start_from_received()
