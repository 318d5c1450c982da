"""What every rank except rank 0 does between two steps: it reports to rank 0 and follows its orders."""

from __future__ import annotations

import signal
from functools import partial
from typing import Any

from nmt_train.common.message import Message, to_facts
from nmt_train.corpus.data_shard import DataShard, from_plain, resume
from nmt_train.training.checkpoint_writer import hand_over
from nmt_train.training.control import Order, Report, Reports
from nmt_train.training.rank_stats import Totals
from nmt_train.training.snapshot import RankState, receive_vector
from nmt_train.training.worker import Worker
from nmt_train.transport import Tag


class Follower:
    """Sends reports to rank 0: counts, measurements, and answers to orders (see control.py)."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._transport = worker, worker.transport
        self._synchronous = worker.plan.synchronous
        self._epochs = worker.position.epochs  # completed by all workers
        self._reports = Reports(self._transport)
        self._over, self._signal = False, 0
        self._allowed = 0  # orders STEP that this worker has not used yet
        self._leader: dict[str, Any] | None = None  # the last state received from rank 0; a new rank 0 would continue from it

    def should_continue(self) -> bool:
        """Follow the orders that have arrived, and wait for workers that are far behind.

        With a synchronous exchange, a worker waits for the order STEP before the first of the steps whose gradients it
        exchanges together. A worker that has not joined yet only follows orders.
        """
        in_step = self._synchronous and not self._worker.strategy.mid_series
        if in_step:
            while not self._over and not self._allowed:  # follow no later order yet: it may be the next STEP of a full pipeline
                self._obey()
            self._allowed -= 1
        while not self._over and (self._worker.data_shard.idle or (self._reports.has_order() and not in_step)):
            self._obey()
        while not self._over and self._worker.too_far_ahead(self._epochs):
            self._worker.pause(self)
            self._report()
            self._obey()
        return not self._over

    def step_done(self, updated: bool) -> None:
        if updated or self._worker.position.batches == 0 or self._signal:
            self._report(exchanged=updated)

    def skipped(self, what: str) -> None:
        self._report(said=what)

    def ask(self, wanted: signal.Signals) -> None:
        """Record a signal that asks training to stop; the next report tells rank 0."""
        self._signal = int(wanted)

    def _report(self, **more: Any) -> None:
        worker = self._worker
        spans = worker.trace.take() if worker.config.trace else ()
        self._reports.send(
            Report(
                worker.progress.take(), worker.position, worker.settled_position, worker.strategy.updates,
                Totals.of(worker.measured()), signal=self._signal, spans=spans, **more,
            )
        )  # fmt: skip

    def _obey(self) -> Order:
        """Wait for the next order from rank 0, follow it, and return it."""
        order, facts = self._reports.order()
        match order:
            case Order.EPOCHS:
                self._epochs = facts["epochs"]
                if self._worker.data_shard.idle:  # its shard serves the others, but it trains no batches itself
                    self._worker.decay(self._epochs)
            case Order.STEP:
                self._allowed += 1
            case Order.REMEMBER:
                self._leader = facts["leader"]
            case Order.DRAIN:
                self._worker.drain(self)
                self._report(met=True)
                self._until(Order.HAND_OVER)  # take no step before the order HAND_OVER
            case Order.HAND_OVER:
                joins = self._worker.data_shard.idle and self._transport.rank < facts["workers"]
                if joins:
                    self._worker.strategy.refresh()
                else:
                    self._worker.strategy.prepare_snapshot()
                self._transport.spawn("checkpoint", partial(hand_over, self._transport, self._worker.part()))
                self._report(met=True)
                self._until(Order.CONTINUE)  # sent after all ranks have handed over
            case Order.REDISTRIBUTE:
                self._worker.drain(self)
                self._report(met=True)
                self._until(Order.CONTINUE)
            case Order.CONTINUE if "workers" in facts:
                self._leader = facts["leader"] or self._leader
                stages, rank = from_plain(facts["stages"]), self._transport.rank
                self._worker.assign(*resume(rank, stages, facts["workers"], redistribute=True))
            case Order.END:
                self._over = True
        return order

    def _until(self, what: Order) -> None:
        while not self._over and self._obey() != what:
            pass

    def begin(self) -> None:
        """Begin with the part that rank 0 sends: the state of a checkpoint, or rank 0's initial parameters."""
        facts = to_facts(self._state(), "workers", "stages", "epochs")
        part = RankState.receive(self._state)
        receive_vector(self._worker.flat.frozen.vector, self._state)
        self._worker.flat.frozen.use()
        data_shard = DataShard(self._transport.rank, facts["workers"], from_plain(facts["stages"]), self._synchronous)
        self.resume_from(part, data_shard, facts["epochs"], "rank 0's checkpoint")

    def _state(self) -> Message:
        message: Message = self._transport.receive(0, Tag.STATE).result()[1]
        return message

    def resume_from(self, part: RankState, data_shard: DataShard, epochs: int, where: str) -> None:
        """Begin with `part`, together with all other ranks.

        epochs: the number of completed epochs. where: the origin of the part, for error messages.
        """
        self._epochs = epochs
        self._worker.load_part(part, data_shard, where)
        self._report(met=True)
        self._until(Order.CONTINUE)  # sent after every rank has its part
        self._worker.strategy.resume()
        self._report(met=True)
        self._until(Order.CONTINUE)  # sent when every rank has the parameters and training is not already over
        self._worker.begun(lambda: self._leader)
