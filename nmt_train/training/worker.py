"""A worker: one rank's model, data, device and training loop."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from nmt_train import device
from nmt_train.common.duration import Duration
from nmt_train.common.errors import NotFinite
from nmt_train.config import Config
from nmt_train.corpus.ahead import Ahead
from nmt_train.corpus.batch import Batch, Turn
from nmt_train.corpus.data_shard import DataShard, Position
from nmt_train.modes.build import build
from nmt_train.modes.resolve import resolve
from nmt_train.optim.flat_model import FlatModel, cpu_copy
from nmt_train.run.progress import Progress
from nmt_train.strategy.state import Vectors
from nmt_train.strategy.strategy import MOST_UNACKNOWLEDGED
from nmt_train.trace import Trace
from nmt_train.training.snapshot import RankState, contributed
from nmt_train.transport import Tag, Transport

LEAD = 1  # how many epochs a worker may be ahead of the slowest one
_MOST_SKIPPED = 50  # maximum consecutive skips for non-finite values; beyond it, the parameters must be unusable


class Coordinator(Protocol):
    """Decides what happens between two steps of a worker: `Leader` on rank 0, `Follower` on the other ranks."""

    def should_continue(self) -> bool:
        """Called before each batch; returns False when training is over."""

    def step_done(self, updated: bool) -> None:
        """Called after each batch; `updated`: whether the worker has exchanged its gradients."""

    def skipped(self, what: str) -> None:
        """Called when the worker has skipped a batch or an exchange because a gradient was not finite.

        what: a sentence for the log.
        """


class Stream(Protocol):
    """The source of a worker's batches."""

    def stream(self, data_shard: DataShard, position: Position) -> Iterator[Turn]:
        """Yield turns from `position` on, endlessly."""

    def epochs(self, length: Duration | None) -> float:
        """Return a length in epochs or target tokens as a number of epochs; infinite for others."""

    def described(self, batch: Any) -> str:
        """Which lines of the corpus a batch consists of, for messages."""


class _Trained(NamedTuple):
    """A batch on which a worker has trained. loss: a scalar."""

    position: Position
    batch: Batch
    loss: Tensor


class Worker:
    """`progress` counts what this worker has done; on rank 0 it also includes the counts of all other workers."""

    def __init__(self, config: Config, transport: Transport, model: Any, batches: Stream) -> None:
        """model: a module; `loss(batch)` is the mean cost per token. Raises UserError if the mode rejects these ranks."""
        self.config, self.transport, self.model, self.batches = config, transport, model, batches
        self.plan = resolve(config, transport.nodes)
        self.flat = FlatModel(model, config.precision)
        self.device = own = self.flat.parameters.device
        self.trace = Trace(config.trace, transport, device.settle(own))
        transport.observe = self.trace.add
        self.strategy = build(self.plan, self.flat, transport, self.trace)
        # Whether the only exchange is one at the end, in which all workers take part.
        self.joins_once = self.plan.exchanges_once and self.plan.synchronous
        until = self.plan.optimizer.cosine_until
        # Over how many updates, or else epochs, the learning rate falls.
        self._decay_updates = until.amount if until is not None and until.unit == "u" else math.inf
        self._decay_epochs = batches.epochs(until)
        self.progress = Progress()
        # The smallest number of epochs in `stop.after`: no worker trains beyond it.
        self.last_epoch = min((span.amount for span in config.stop.after if span.unit == "e"), default=math.inf)
        self.assignments = 0  # how many times batches have been assigned to workers
        self._trained = 0  # number of batches trained
        self._positions: deque[tuple[Position, int]]  # at the last exchanges: data position, and number of trained batches
        self.assign(DataShard(transport.rank, transport.size), Position())
        # The batches of each sum of gradients that is in flight, and last of the sum that grows.
        self._recent = deque[list[_Trained]]([[]], self.strategy.max_in_flight + 1)
        self._skipped = 0  # skips because of non-finite values since the last update
        self.has_part = False  # whether this worker has received its part of the training state
        # Returns the state from which a new rank 0 would continue, as last known to this rank. None until all ranks train.
        self.leader: Callable[[], dict[str, Any] | None] | None = None
        self.forget: Callable[[], None] | None = None  # frees the state kept for recovery; called once all ranks train

    def run(self, coordinator: Coordinator) -> None:
        """Train until the coordinator says that training is over."""
        strategy, trace, progress = self.strategy, self.trace, self.progress
        while coordinator.should_continue():
            batch, last, epochs = next(self._stream)
            self.decay(epochs)
            updated, loss = False, None
            if batch is not None:
                with trace.span("forward", batch.target_tokens):
                    loss = self.flat.loss(batch.to(self.device))
                strategy.backward(loss, batch.target_tokens)
                self._recent[-1].append(_Trained(self._here(), batch, loss.detach()))
            if batch is not None or self.plan.synchronous:  # every worker takes part in a synchronous exchange
                try:
                    updated = strategy.skip() if batch is None else strategy.step()
                    if batch is not None and loss is not None:
                        progress.advance(loss, batch)
                except NotFinite as error:
                    progress.skip()
                    coordinator.skipped(self._not_finite(error))
            self.position.advance(last)
            self._trained += batch is not None
            if updated or self.plan.local_steps:
                self._recent.append([])
            if updated:
                self._skipped, trace.update = 0, strategy.updates
                self._positions.append((self._here(), self._trained))
            coordinator.step_done(updated)

    def decay(self, epochs: float) -> None:
        """Tell the optimizer how far the decay of the learning rate is; epochs: how much of the corpus has been trained."""
        strategy = self.strategy
        done = epochs / self._decay_epochs + strategy.updates / self._decay_updates  # at least one of them is 0
        strategy.optimizer.decayed = min(1.0, done)

    def drain(self, coordinator: Coordinator) -> None:
        """Finish all exchanges that are in flight."""
        while True:
            try:
                self.strategy.drain()
                self._positions = deque([(self._here(), self._trained)], self._positions.maxlen)
                return
            except NotFinite as error:  # one exchange failed; others may still be pending
                self.progress.skipped += 1
                coordinator.skipped(self._not_finite(error))

    def too_far_ahead(self, slowest: int) -> bool:
        """Whether this worker must wait for the slowest one, which has completed `slowest` epochs.

        A synchronous exchange makes workers wait for each other anyway, except if the only exchange is at the end.
        """
        epochs = self.position.epochs
        if self.plan.synchronous:
            return self.joins_once and epochs >= self.last_epoch
        return epochs >= self.last_epoch or epochs > slowest + LEAD

    def pause(self, coordinator: Coordinator) -> None:
        """Called before this worker waits for slower ones: finish all exchanges, or prepare for the only one at the end."""
        if not self.joins_once:
            self.drain(coordinator)
        elif not self.strategy.mid_series:
            self.strategy.skip()  # so that this worker takes part in that exchange even if it has had no batch

    def part(self) -> RankState:
        """This rank's part of a snapshot: a copy on the CPU, so that training can continue."""
        slices, rank = self.strategy.slices, self.transport.rank
        if contributed(slices)[rank] == slices[rank]:
            piece = self.strategy.piece()
            shard, numbers = piece.vectors, piece.numbers or {}
        else:  # another rank contributes the same slice
            shard, numbers = {}, self.strategy.optimizer.everything()[1]
        state = self.strategy.state().each(cpu_copy)
        if self.data_shard.idle:  # an idle worker starts from the global parameters when it joins
            state = replace(state, received=None)
        return RankState(shard, state, self.random(), numbers, self._here())

    def random(self) -> Vectors:
        """The states of torch's random number generators."""
        return device.random(self.device)

    @property
    def settled_position(self) -> Position:
        """The position up to which no gradient of this worker can still be in flight."""
        return self._settled[0]

    @property
    def unsettled_batches(self) -> int:
        """The number of batches trained after `settled_position`."""
        return self._trained - self._settled[1]

    @property
    def _settled(self) -> tuple[Position, int]:
        return self._positions[-1 - min(self.strategy.unsettled, len(self._positions) - 1)]

    def _here(self) -> Position:
        return Position(**vars(self.position))

    def load_part(self, part: RankState, data_shard: DataShard, where: str) -> None:
        """Load a part, then clear it to free memory. Raises UserError if another optimizer wrote the part.

        where: the origin of the part, for error messages. The caller calls `Strategy.resume` later, when all ranks have loaded
        their parts.
        """
        optimizer = self.strategy.optimizer
        vectors, self.has_part = dict(part.shard), True
        optimizer.parameters.copy_(vectors.pop("parameters"))
        smoothed = vectors.pop("smoothed", None)
        if optimizer.smoothed is not None:
            optimizer.smoothed.copy_(optimizer.parameters if smoothed is None else smoothed)
        optimizer.load(vectors, part.numbers, where)
        self.strategy.load(part.worker_state)
        part.shard.clear()
        part.worker_state.clear()
        self.assign(data_shard, part.position)
        device.set_random(self.device, part.random)

    def begun(self, leader: Callable[[], dict[str, Any] | None]) -> None:
        """Called when all ranks have begun training; sets `self.leader` and calls `self.forget`."""
        self.leader = leader
        if self.forget is not None:
            self.forget()
            self.forget = None

    def assign(self, data_shard: DataShard, position: Position) -> None:
        """Train on the batches of `data_shard` from `position` on."""
        self.data_shard, self.position = data_shard, position
        self.assignments += 1
        most = self.strategy.max_in_flight + MOST_UNACKNOWLEDGED + 1
        self._positions = deque([(self._here(), self._trained)], most)
        stream = self.batches.stream(data_shard, position)
        self._stream = Ahead(stream, Turn.pinned, device.inherit()) if self.device.type == "cuda" else stream

    def measured(self) -> dict[str, Any]:
        """Running totals since this start, as JSON. (`progress` counts the target tokens.)

        sent, received: [messages, bytes] by tag. spent: seconds by thread and span name. staleness, steps: see `Strategy`.
        cpu: CPU seconds of the process and of its progress thread.
        """
        transport, strategy = self.transport, self.strategy
        return {
            "sent": {Tag(tag).name.lower(): list(count) for tag, count in list(transport.sent.items())},
            "received": {Tag(tag).name.lower(): list(count) for tag, count in list(transport.received.items())},
            "spent": {thread: dict(spans) for thread, spans in list(self.trace.spent.items())},
            "staleness": dict(strategy.staleness),
            "steps": dict(strategy.steps),
            "cpu": {"all": time.process_time(), "progress thread": transport.cpu},
        }

    def _not_finite(self, error: NotFinite) -> str:
        """Return a sentence for the log if training may continue with the next batch; else raise NotFinite."""
        where = f"update {self.strategy.updates + 1}"
        recent = [trained for batches in self._recent for trained in batches]
        suspects = [trained for trained in recent if not torch.isfinite(trained.loss)]
        if not suspects and self.transport.size > 1 and self.plan.synchronous and not self.plan.local_steps:
            where += ", in the sum of all ranks' gradients"
        else:
            suspects = suspects or (recent if len(recent) == 1 else [])
        for position, batch, loss in suspects:
            where += f", batch {position.batches + 1} of epoch {position.epochs + 1} ({self.batches.described(batch)}): "
            where += f"cost {float(loss):.4g}"
        self._recent.clear()
        self._recent.append([])
        if self.transport.size > 1:
            where = f"rank {self.transport.rank} on host {self.transport.hosts[self.transport.rank]}, {where}"
        where += f", {error}"
        self._skipped += 1
        if self.config.optimizer.not_finite == "stop" or self._skipped > _MOST_SKIPPED:
            hint = ", or set optimizer.not_finite: skip" if self._skipped == 1 else f"; {_MOST_SKIPPED} were skipped before it"
            raise NotFinite(
                f"{where}; earlier checkpoints are intact: lower optimizer.learning_rate or lengthen optimizer.warmup{hint}"
            )
        return f"skipped: {where}"


Make = Callable[[Config, Transport], Worker]  # builds the worker of a rank
