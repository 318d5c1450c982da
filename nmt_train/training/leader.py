"""What rank 0 does between two steps: it logs, validates, saves, and tells the other ranks when to send their state and end.

For a checkpoint, every worker first finishes its exchanges (it drains), so that each push has reached all shards or none. Then
all ranks record their state, and resume training as soon as all have recorded it. The other ranks send their state while they
train. Rank 0 writes the checkpoint when the state of all ranks has arrived.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from nmt_train.common.duration import Mark
from nmt_train.common.message import from_json
from nmt_train.corpus.batches import Batches
from nmt_train.corpus.data_shard import DataShard, Position, plain, resume
from nmt_train.model.metrics import TestSets
from nmt_train.optim.flat_model import cpu_copy
from nmt_train.run.folder import Run
from nmt_train.run.log import Log
from nmt_train.server.nodes import first_ranks
from nmt_train.trace import write_spans
from nmt_train.training.background_validation import BackgroundValidation
from nmt_train.training.checkpoint_writer import CheckpointWriter
from nmt_train.training.control import Order, Orders
from nmt_train.training.data_balance import DataBalancer
from nmt_train.training.leader_state import LeaderState
from nmt_train.training.rank_stats import RankStatistics
from nmt_train.training.snapshot import PendingSnapshot, RankState, Snapshot, contributed, vector_messages
from nmt_train.training.worker import Worker
from nmt_train.transport import Tag


class Leader:
    """reason: why training is over, or None while it continues. signal: the signal that asks training to stop, or None.

    pairs: the number of sentence pairs in an epoch, or 0 if unknown.
    """

    def __init__(
        self, worker: Worker, run: Run, log: Log, state: LeaderState, test_sets: TestSets, simulated: bool = False
    ) -> None:
        self._worker, self._transport, self._config = worker, worker.transport, worker.config
        self._run, self._log, self._state = run, log, state
        self._progress = worker.progress = state.progress
        self._orders, self._data_balancer = Orders(self._transport), DataBalancer(worker, self._progress)
        self._updates = 0  # the highest number of updates that another rank has reported
        self._synchronous = worker.plan.synchronous
        self._statistics = RankStatistics(worker)
        self._before: Mark | None = None
        self.pairs = len(worker.batches) if isinstance(worker.batches, Batches) else 0
        self._started = 0.0  # seconds of the run when this start began to train
        self._checkpoint_writer = CheckpointWriter(worker, run, state, disk=not simulated)
        self._validation = BackgroundValidation(worker, run, log, state, test_sets, lambda: self.signal is not None)
        self._held: PendingSnapshot | None = None  # the final snapshot, while the other ranks wait at the barrier
        self._skipped = False  # the present batch
        self.reason: str | None = None
        self.signal: signal.Signals | None = None

    def begin(self, snapshot: Snapshot) -> None:
        """Send every rank its part of `snapshot`, and begin training from it."""
        strategy, plan = self._worker.strategy, self._worker.plan
        first = first_ranks(self._transport.nodes) if plan.per_node else None
        workers = self._data_balancer.workers()
        whole = snapshot.with_optimizer_at(strategy.optimizer.adds_updates)
        parts = whole.split(strategy.slices, first, workers, means=plan.synchronous)
        stages = resume(0, snapshot.stages, workers)[0].stages
        facts = {"stages": plain(stages), "workers": workers, "epochs": self._progress.epochs}
        frozen = cpu_copy(self._worker.flat.frozen.vector)
        for rank in self._orders.followers:
            for message in (from_json(facts), *parts[rank].messages(), *vector_messages(frozen)):
                self._transport.send(rank, Tag.STATE, message)
        self.resume_from(parts[0], DataShard(0, workers, stages, plan.synchronous), snapshot.stages, str(self._run.folder))
        if snapshot.stages:
            self._checkpoint_writer.known(snapshot.numbers["updates"], snapshot.stages[-1])

    def resume_from(self, part: RankState, data_shard: DataShard, stages: Sequence[Sequence[Position]], where: str) -> None:
        """Begin training with this part, together with all other ranks, at the positions in the last of `stages`."""
        self._worker.load_part(part, data_shard, where)
        self._progress.start_clock(self._transport.now)
        self._data_balancer.begin(stages, data_shard.size)
        self._meet()  # every rank has its part
        self._remember()
        self._orders.give(Order.CONTINUE)
        self._worker.strategy.resume()
        self._meet()  # every rank has its parameters
        self._worker.begun(self._facts)
        self._count()
        self._progress.start_clock(self._transport.now)

    def start_first_batch(self, recovered: bool) -> None:
        """Run a validation that a signal postponed; unless training is over, let the other ranks start their first batch.

        recovered: training continues without ranks that have ended; no early log lines are written again.
        """
        self.reason = self._reason_to_stop()
        if self._state.validation_pending:
            self._save(validate=True)
        if self.reason is None:
            self._orders.give(Order.CONTINUE)
        self._before = self._progress.mark()
        self._started = -math.inf if recovered else self._before.seconds

    def should_continue(self) -> bool:
        if self.reason is None and self._synchronous and not self._worker.strategy.mid_series:
            self._orders.give(Order.STEP)
        while self.reason is None and self._data_balancer.too_far():
            self._worker.pause(self)
            self._count()
            self._progress.tick(training=True)
            self._after_step(updated=not self._worker.joins_once)
            if self.reason is None:
                self._hear(wait=True)  # a slower worker will report when it has caught up
                self._advance_background()
        if self.reason is not None:
            self._finish()
        return self.reason is None

    def step_done(self, updated: bool) -> None:
        self._count()
        # In synchronous modes, the next update decides, because all workers make as many exchanges; so it does with one rank,
        # because stopping earlier would apply a part of the gradients that `batch.accumulate` adds up.
        within_update = self._transport.size == 1 and self._worker.plan.accumulate > 1 and self._worker.strategy.mid_series
        if (self._skipped or (self.signal and not within_update)) and not self._synchronous:
            self.reason = self._reason_to_stop()
        self._skipped = False
        self._hear()
        if updated and self._synchronous:
            while not self._orders.all_exchanged:
                self._hear(wait=True)  # decisions must not depend on the order of reports
            self._orders.begin_exchange()
        self._advance_background()
        self._after_step(updated)

    def _after_step(self, updated: bool) -> None:
        if updated or (self._worker.plan.exchanges_once and self._reason_to_stop()):
            self._after_update()

    def skipped(self, what: str) -> None:
        self._log.say(what)
        self._skipped = True

    def _count(self) -> None:
        """Update the position in the data; tell the other ranks when an epoch is complete."""
        if self._data_balancer.count():
            self._orders.give(Order.EPOCHS, epochs=self._progress.epochs)

    def _hear(self, wait: bool = False) -> None:
        """Process the reports that have arrived; with `wait`, wait for at least one."""
        while wait or self._orders.has_report():
            wait = False
            source, report = self._orders.report()
            self._progress.merge(report.counted)
            self._data_balancer.heard(source, report.position, report.settled, report.updates)
            self._updates = max(self._updates, report.updates)
            self._statistics.report(source, report.counted["tokens"], report.totals)
            if report.signal and self.signal is None:
                self.signal = signal.Signals(report.signal)
            if report.said:
                self._log.say(report.said)
            if report.spans:
                write_spans(self._run.folder / "trace", source, self._transport.nodes[source], report.spans)
            self._count()

    def _facts(self) -> dict[str, Any]:
        """The state that a new rank 0 needs to continue with the surviving ranks, beyond what these ranks hold themselves."""
        updates = max(self._updates, self._worker.strategy.updates)
        return {**self._state.own(), **self._data_balancer.facts(), "updates": updates, "clock": self._progress.clock}

    def _remember(self) -> None:
        """Send this state to the other ranks, so that any of them can take over as rank 0."""
        if self._transport.fault_tolerant:
            self._orders.give(Order.REMEMBER, leader=self._facts())

    def _after_update(self) -> None:
        """Log, validate and save if due; set `reason` if training is to stop."""
        config, progress, strategy = self._config, self._progress, self._worker.strategy
        progress.updates = strategy.updates
        before, now = self._before or progress.mark(), progress.mark()
        self._before = now
        if self._log.bar is not None:
            self._log.bar.advance(progress, config.stop.share(progress, self.pairs))
        self.reason = self._reason_to_stop()
        if config.log.due(before, now, self._started):
            words = progress.words()
            self._log.train(progress, strategy.gradient_norm, strategy.learning_rate)
            self._statistics.log(self._log, progress, words)
            self._write_spans()
        every = config.validation.every
        validate = every is not None and (every.crossed(before, now) or bool(self.reason and not self.signal))
        if self._checkpoint_writer.due(now) or self.reason or self._data_balancer.grows():
            self._save(validate)
            self._remember()
            return
        if validate:
            self._validation.request()
            self._advance_background()
            self.reason = self._reason_to_stop()  # a signal may have interrupted the validation
        if self._data_balancer.needs_redistribution():
            self._drain_and_redistribute()
        if config.recovery.every.crossed(before, now):
            self._remember()

    def _save(self, validate: bool) -> None:
        """Write a checkpoint; if `validate`, also validate the parameters that it holds."""
        pending = self._collect(validate)
        # Finish all requested validations, so that the checkpoint includes their results.
        if self._validation.advance(wait=True) or self.signal:  # which may have interrupted a validation
            self.reason = self._reason_to_stop()
        self._checkpoint_writer.begin(pending)
        if self._held is not None and self.reason is None:  # a new best has reset the patience counter
            self._held = None
            self._orders.give(Order.CONTINUE)  # the other ranks have waited for this order since they sent their parts

    def _advance_background(self) -> None:
        """Write the pending checkpoint and run the pending validations if the parts of all ranks have arrived."""
        self._checkpoint_writer.advance()
        if self._validation.advance():
            self._remember()  # otherwise a new rank 0 could take a worse model for the best one, and delete this one
            self.reason = self.reason or self._reason_to_stop()

    def _reason_to_stop(self) -> str | None:
        if self.signal:
            return f"{self.signal.name} received"
        return self._config.stop.reason(self._progress) or self._state.patience.reason

    def _collect(self, validate: bool = False) -> PendingSnapshot:
        """Start a snapshot of all ranks at one moment; the other ranks keep their parts until the checkpoint is written.

        validate: also request a validation of its parameters.
        """
        worker, start = self._worker, self._transport.now()
        self._orders.give(Order.DRAIN)
        worker.drain(self)
        self._meet()
        self._checkpoint_writer.advance(wait=True)  # finish the previous checkpoint, if it is still being written
        workers = self._data_balancer.workers()  # decided once, because those that join pull the parameters now
        self._orders.give(Order.HAND_OVER, workers=workers)
        worker.strategy.prepare_snapshot()
        self._progress.updates = worker.strategy.updates
        if validate:
            self._validation.request()
        own, stages = worker.part(), worker.data_shard.stages
        positions = [Position(**vars(position)) for position in self._data_balancer.positions]
        self._meet()  # every rank has copied its part
        slices = contributed(worker.strategy.slices)
        pending = PendingSnapshot(own, slices, stages, positions, self._transport.now() - start)
        if self.reason is not None:
            self._held = pending  # the state is final: the other ranks wait for the order END
        elif workers > worker.data_shard.size:
            self._log.say(f"{workers} workers train from now on")
            self._redistribute(workers)
        else:
            self._orders.give(Order.CONTINUE)
        return pending

    def _redistribute(self, workers: int) -> None:
        """Redistribute the remaining batches of the epoch to the first `workers` ranks."""
        order = self._data_balancer.redistribute(workers)
        self._orders.give(Order.CONTINUE, leader=self._facts() if self._transport.fault_tolerant else None, **order)

    def _drain_and_redistribute(self) -> None:
        """Drain all workers, and redistribute the remaining batches so that no worker has to wait for a slow one."""
        self._orders.give(Order.REDISTRIBUTE)
        self._worker.drain(self)
        self._meet()
        self._count()
        self._redistribute(self._worker.data_shard.size)

    def _meet(self) -> None:
        """Wait until all other ranks have reached the barrier."""
        while not self._orders.all_met:
            self._hear(wait=True)
        self._orders.leave_meeting()

    def _finish(self) -> None:
        """Save the final state, and order the other ranks to end."""
        pending = self._held or self._collect()
        self._validation.advance(wait=True)
        if not self._checkpoint_writer.has(pending):
            self._checkpoint_writer.begin(pending)
        self._checkpoint_writer.advance(wait=True)
        self._hear()
        self._write_spans()
        self._orders.give(Order.END)

    def complete_checkpoint(self) -> None:
        """Called if training ends by an error: complete the checkpoint that is being written, if that is still possible."""
        with suppress(Exception):
            self._checkpoint_writer.advance(wait=True)

    def _write_spans(self) -> None:
        write_spans(self._run.folder / "trace", 0, self._transport.nodes[0], self._worker.trace.take())

    def ask(self, wanted: signal.Signals) -> None:
        """Record a signal that asks training to stop; only the first signal counts, whichever rank received it."""
        self.signal = self.signal or wanted
        # Bypass the log: the signal may have interrupted the writing of a line.
        with suppress(OSError):
            os.write(2, f"\n{self.signal.name}: saving and stopping; send it again to stop without saving\n".encode())
