"""When a worker exchanges its gradients: what every schedule does, and the settings of overlapping."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from nmt_train.common.section import STRICT
from nmt_train.distributed.exchange import Exchange, Vectors
from nmt_train.optim.gradient_accumulation import Pile
from nmt_train.trace import Trace

RECEIVED = "worker.received"  # among the vectors that a worker carries


@dataclass(frozen=True, config=STRICT)
class OverlapConfig:
    """Exchanging while the next batches are computed (thesis 3.4, 3.7)."""

    bound: int = Field(
        default=128,
        ge=0,
        le=10**6,
        description="most steps from one exchange to the next: then the worker waits, as for a machine that is paused; 0: any"
        " [steps]",
    )
    local_update: Literal["none", "sum", "optimizer"] = Field(
        default="sum",
        description="sum: what was received is updated with the gradients just given away, which it lacks; optimizer: a"
        " worker updates its own parameters at every step in between; none: neither",
    )


@dataclass(frozen=True, config=STRICT)
class PipelineConfig:
    """Exchanging while the next batches are computed, all workers in step (Pipe-SGD)."""

    width: int = Field(
        default=2, ge=1, le=1000, description="steps from a gradient to its update, and 1: at 2 one sum is under way [steps]"
    )
    warmup: int = Field(default=0, ge=0, le=10**9, description="at first, updates without a pipeline [updates]")


@dataclass(frozen=True, config=STRICT)
class LocalConfig:
    """Steps that every worker makes by its own optimiser before all exchange how far they have gone."""

    every: int | None = Field(
        default=None,
        ge=0,
        le=10**9,
        description="steps of each worker from one exchange to the next; 0: once, at the end; null: as the mode has it [steps]",
    )
    outer: Literal["none", "nesterov", "elastic"] | None = Field(
        default=None,
        description="the ways that workers went are, on the mean, none: gone by all; nesterov: the gradient of an outer"
        " optimiser; elastic: gone by a common centre in part; null: as the mode has it",
    )
    elastic_share: float = Field(
        default=0.1, gt=0, le=1, description="elastic: how much of the distance worker and centre each go towards the other"
    )
    outer_rate: float = Field(default=0.7, gt=0, description="nesterov: the outer learning rate")
    outer_momentum: float = Field(default=0.9, ge=0, lt=1, description="nesterov: the outer momentum")


@dataclass(frozen=True, config=STRICT)
class DownpourConfig:
    """Pushing gradients and fetching parameters independently (Dean et al. 2012)."""

    push: int = Field(
        default=1, ge=1, le=10**9, description="a worker pushes so many gradients as one (batch.reduction) [steps]"
    )
    fetch: int = Field(default=1, ge=1, le=10**9, description="a worker fetches parameters so often [steps]")


class Schedule(ABC):
    """`exchange` is with whom; steps: how many exchanges covered so many steps.

    between: steps have been made since the last exchange, so that the next one does not begin a new sum.
    behind: how many of what was given away may still be under way when `step` returns.
    endless: it never exchanges by itself, only when it is drained. received: what the exchange brings up to date.
    """

    exchange: Exchange
    steps: Counter[int]
    behind: int = 0
    endless: bool = False
    received: Tensor

    def __init__(self, exchange: Exchange, received: Tensor, sums: bool) -> None:
        """sums: gradients are joined by their sum, not by their mean (see joining.py)."""
        self.exchange, self.steps, self.received = exchange, Counter[int](), received
        self.pile = Pile(sums)
        self._goes_on = False  # whether it was given what it had received before

    @property
    def between(self) -> bool:
        return False

    @property
    def learning_rate(self) -> float:
        """Of the last update that the worker knows of."""
        return self.exchange.optimizer.learning_rate

    def backward(self, loss: Tensor, tokens: int, trace: Trace) -> None:
        """Add the gradient of a batch of so many target tokens to the flat gradient; what is complete may set out at once."""
        factor = self.pile.add(tokens)
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
        if self._goes_on:
            self.exchange.restore(self.received)
        else:
            self.refresh()

    def carried(self) -> Vectors:
        """What a drained worker keeps, as vectors (elements,)."""
        return self.exchange.carried() | self.kept() | ({RECEIVED: self.received} if self.exchange.keeps else {})

    def kept(self) -> Vectors:
        """The schedule's own part of it."""
        return {}

    def rescued(self) -> Vectors:
        """`carried`, where the worker was cut short, but for what it had received."""
        return self.exchange.rescued() | self.kept()

    def in_doubt(self) -> Vectors:
        """What it owes besides, unless some rank has had more updates than this one: then it is among them."""
        return {}

    def carry(self, vectors: Mapping[str, Tensor]) -> None:
        """Go on with what `carried` gave."""
        self.exchange.carry(vectors)
        self._goes_on = self.exchange.keeps and RECEIVED in vectors and self.exchange.knows(vectors)
        if self._goes_on:
            self.received.copy_(vectors[RECEIVED])
