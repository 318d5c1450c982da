"""Training: the loop, and what happens between two updates."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from nmt_train import device, modes
from nmt_train.config import Config
from nmt_train.corpus.batches import Batch, Batches
from nmt_train.corpus.store import open_store
from nmt_train.corpus.vocabulary import Vocabulary
from nmt_train.errors import NotFinite
from nmt_train.flat import Flat
from nmt_train.log import Log
from nmt_train.model.transformer import Transformer
from nmt_train.progress import Mark, Progress
from nmt_train.run import Run
from nmt_train.state import State
from nmt_train.stop import Patience
from nmt_train.trace import Trace
from nmt_train.validate import Interrupted, TestSet

_MOST_SKIPPED = 50  # batches in a row that are not finite: the parameters themselves must be beyond repair


class Trainer:
    """One worker: its model, data and device, and the state that a checkpoint keeps."""

    log: Log

    def __init__(self, config: Config, run: Run, vocabulary: Vocabulary) -> None:
        """UserError for whatever is wrong with devices, mode or corpus; nothing is written in the run folder but a store."""
        self.config, self.run, self.vocabulary = config, run, vocabulary
        devices = device.choose(config.devices)
        mode = modes.check(config.mode, devices)
        self.device = devices[0]
        torch.manual_seed(config.seed)
        self.model = Transformer(config.model, len(vocabulary)).to(self.device)
        flat = Flat(self.model)
        schedule = modes.build(mode, flat, config.optimizer, config.batch)
        self.state = State(flat, schedule, Progress(), Patience(config.stop))
        store = open_store(config.corpus.train, "corpus.train", vocabulary, run.folder / "store")
        self.batches = Batches(store, config.corpus, config.batch, vocabulary, config.seed)
        self.test_set = TestSet(config.corpus.valid, "corpus.valid", vocabulary)
        settle = torch.cuda.synchronize if self.device.type == "cuda" else None
        self.trace = Trace(run.folder / "trace" / "rank0.jsonl" if config.trace else None, settle=settle)
        self.signal: signal.Signals | None = None
        self._skipped = 0  # batches since the last update

    def train(self, log: Log) -> str:
        """Train until it is time to stop; returns the reason."""
        self.log = log
        state, schedule, trace = self.state, self.state.schedule, self.trace
        progress = state.progress
        progress.start_clock()
        if state.validation_pending:
            self._save(self._validate())
        before, reason = progress.mark(), self._reason_to_stop()
        stream = self.batches.stream(progress.epochs, progress.batches)
        while reason is None:
            batch, last = next(stream)
            with trace.span("forward"), device.autocast(self.device, self.config.precision):
                loss = self.model.loss(batch.to(self.device))
            with trace.span("backward"):
                loss.backward()
            try:
                with trace.span("update"):
                    updated = schedule.step()
            except NotFinite as error:
                self._not_finite(error, loss, batch)
                progress.skip(last)
                reason = self._reason_to_stop()
                if reason:
                    self._save([])
                continue
            progress.advance(loss, batch, last)
            if updated:
                self._skipped = 0
                progress.updates = trace.update = schedule.exchange.updates
                reason = self._after_update(before, progress.mark())
                before = progress.mark()
        schedule.drain()
        trace.flush()
        return reason

    def _after_update(self, before: Mark, now: Mark) -> str | None:
        """Log, validate and save whatever is due; returns the reason to stop, if there is one."""
        config, progress = self.config, self.state.progress
        optimizer = self.state.schedule.exchange.optimizer
        self.log.advance(progress)
        reason = self._reason_to_stop()
        if config.log.every.crossed(before, now):
            self.log.train(progress, self.state.schedule.gradient_norm, optimizer.learning_rate)
            self.trace.flush()
        best: list[str] = []
        every = config.validation.every
        if every and (every.crossed(before, now) or (reason and not self.signal)):
            best = self._validate()
            reason = self._reason_to_stop()
        if reason or best or config.checkpoint.every.crossed(before, now):
            self._save(best)
        return reason

    def _reason_to_stop(self) -> str | None:
        if self.signal:
            return f"{self.signal.name} received"
        for span in self.config.stop.after:
            if span.reached(self.state.progress):
                return f"stop.after {span} reached"
        if self.state.patience.exhausted:
            return f"no new best in {self.config.stop.patience} validations (stop.patience)"
        return None

    def _validate(self) -> list[str]:
        """Measure the global parameters, smoothed if so configured; returns the metrics with a new best."""
        state, optimizer = self.state, self.state.schedule.exchange.optimizer
        state.progress.tick(training=True)
        state.validation_pending = True
        try:
            with state.flat.using(optimizer.smoothed):
                scores = self.test_set.measure(self.model, self.config.validation, lambda: self.signal is not None)
        except Interrupted:
            return []
        finally:
            state.progress.tick(training=False)
        state.validation_pending = False
        verdicts = state.patience.record(scores.values)
        self.log.validation(state.progress, scores.values, verdicts)
        if scores.translations is not None:
            self.run.keep_translations(state.progress.updates, scores.translations)
        best = [metric for metric, verdict in verdicts.items() if not verdict.stalled]
        if not best:
            optimizer.stalled()
        return best

    def _save(self, best: list[str]) -> None:
        update = self.state.progress.updates
        self.state.save(self.run.checkpoint(update), self.config, self.vocabulary)
        for name in ["last", *(f"best-{metric}" for metric in best)]:
            self.run.link(name, update)
        self.run.prune(self.config.checkpoint.keep)
        self.state.progress.tick(training=False)

    def _not_finite(self, error: NotFinite, loss: torch.Tensor, batch: Batch) -> None:
        """Go on without the batch if the user wants that, else end with the last good checkpoint intact."""
        progress = self.state.progress
        pairs = ", ".join(str(pair + 1) for pair in batch.pairs[:5]) + (", ..." if len(batch.pairs) > 5 else "")
        where = (
            f"update {progress.updates + 1}, batch {progress.batches + 1} of epoch {progress.epochs + 1} (lines {pairs}):"
            f" cost {float(loss.detach()):.4g}, {error}"
        )
        self._skipped += 1
        if self.config.optimizer.not_finite == "stop" or self._skipped > _MOST_SKIPPED:
            hint = ", or set optimizer.not_finite: skip" if self._skipped == 1 else f"; {_MOST_SKIPPED} were skipped before it"
            raise NotFinite(
                f"{where}; earlier checkpoints are intact: lower optimizer.learning_rate or lengthen optimizer.warmup{hint}"
            )
        self.log.say(f"skipped: {where}")

    @contextmanager
    def signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM ask for a checkpoint and an end; a second one ends at once."""

        def ask(number: int, frame: FrameType | None) -> None:
            if self.signal:
                raise KeyboardInterrupt
            self.signal = signal.Signals(number)
            # Not through the log: the signal may have come while a line was being written.
            os.write(2, f"\n{self.signal.name}: saving and stopping; once more to stop without saving\n".encode())

        previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
