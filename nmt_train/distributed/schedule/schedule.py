"""When a worker exchanges its gradients: what every schedule does, and what it can be combined with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from nmt_train.distributed.context import BuildContext
from nmt_train.distributed.exchange.exchange import Exchange, Vectors
from nmt_train.optim.gradient_accumulation import GradientAccumulator
from nmt_train.trace import Trace

RECEIVED = "worker.received"  # among the vectors that a worker carries


class Schedule(ABC):
    """`exchange` is with whom; steps: how many exchanges covered so many steps.

    What can be combined with it: works_with: the class of exchanges that it needs. alone: it makes sense for a rank that is
    alone. in_lockstep: all workers can exchange at the same step. accumulates: batch.accumulate applies to it. one_call: it
    gives and fetches in one call, so that another rank can do both for it. in_parts: parts of a gradient may travel separately.
    updates: it turns gradients into finished updates. in_flight: exchanges that may be under way while a gradient is computed,
    where the exchange does not wait for others.

    between: steps have been made since the last exchange, so that the next one does not begin a new sum.
    behind: how many of what was given away may still be under way when `step` returns.
    endless: it never exchanges by itself, only when it is drained. received: what the exchange brings up to date.
    """

    works_with: ClassVar[type] = Exchange
    alone: ClassVar[bool] = False
    in_lockstep: ClassVar[bool] = False
    accumulates: ClassVar[bool] = False
    one_call: ClassVar[bool] = True
    in_parts: ClassVar[bool] = False
    updates: ClassVar[bool] = False
    exchange: Exchange
    steps: Counter[int]
    max_in_flight: int = 0
    endless: bool = False
    received: Tensor

    def __init__(self, exchange: Exchange, received: Tensor, sums: bool) -> None:
        """sums: gradients are joined by their sum, not by their mean (see joining.py)."""
        self.exchange, self.steps, self.received = exchange, Counter[int](), received
        self.accumulator = GradientAccumulator(sums)
        self._restored = False  # whether it was given what it had received before

    @classmethod
    def build(cls, context: BuildContext, exchange: Exchange) -> Schedule:
        """The schedule of a rank, as configured."""
        raise NotImplementedError

    @property
    def mid_accumulation(self) -> bool:
        return False

    @property
    def learning_rate(self) -> float:
        """Of the last update that the worker knows of."""
        return self.exchange.optimizer.learning_rate

    def backward(self, loss: Tensor, tokens: int, trace: Trace) -> None:
        """Add the gradient of a batch of so many target tokens to the flat gradient; what is complete may set out at once."""
        factor = self.accumulator.add(tokens)
        with trace.span("backward", tokens):
            (loss if factor == 1.0 else loss * factor).backward()

    @abstractmethod
    def step(self) -> bool:
        """After each backward pass, or after `pile.add` and a gradient; True when gradients were given away.

        NotFinite if the gradient is not finite; it is then dropped, and training can go on with the next batch.
        """

    def skip(self) -> bool:
        """The same where there was no batch, but other workers had one."""
        return self.step()

    @abstractmethod
    def drain(self) -> None:
        """Finish what is in flight: before a checkpoint, before a wait, and at the end."""

    @abstractmethod
    def refresh(self) -> None:
        """Take exactly the global parameters over, while every worker is drained."""

    def settle(self) -> None:
        """Before a snapshot, while every worker is drained: a worker goes on from what it has, as if there had been none."""
        if self.exchange.keeps:
            self.exchange.settle(self.received)
        else:
            self.refresh()

    def begin(self) -> None:
        """Begin with what `carry` gave, if that says what the worker had received, else with the global parameters."""
        if self._restored:
            self.exchange.restore(self.received)
        else:
            self.refresh()

    def worker_state(self) -> Vectors:
        """What a drained worker keeps, as vectors (elements,)."""
        return self.exchange.worker_state() | self.own_state() | ({RECEIVED: self.received} if self.exchange.keeps else {})

    def own_state(self) -> Vectors:
        """The schedule's own part of it."""
        return {}

    def rescued(self) -> Vectors:
        """`carried`, where the worker was cut short, but for what it had received."""
        return self.exchange.rescued() | self.own_state()

    def in_doubt(self) -> Vectors:
        """What it owes besides, unless some rank has had more updates than this one: then it is among them."""
        return {}

    def load_worker_state(self, vectors: Mapping[str, Tensor]) -> None:
        """Go on with what `carried` gave."""
        self.exchange.load_worker_state(vectors)
        self._restored = self.exchange.keeps and RECEIVED in vectors and self.exchange.knows(vectors)
        if self._restored:
            self.received.copy_(vectors[RECEIVED])
