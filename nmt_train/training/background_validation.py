"""Validation while training continues: rank 0 validates a copy of the global parameters, and no rank waits for the copy."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable

from torch import Tensor

from nmt_train.common.metric import is_worst, named
from nmt_train.model.metrics import Interrupted, Scores, TestSets
from nmt_train.run.folder import Run
from nmt_train.run.log import Log
from nmt_train.run.progress import Progress
from nmt_train.training.leader_state import LeaderState
from nmt_train.training.worker import Worker
from nmt_train.transport import Future


class BackgroundValidation:
    """Only rank 0 receives the copy, and only its device runs the validation; the workers' state does not change.

    asked_to_stop: returns whether a signal asks training to stop.
    """

    def __init__(
        self, worker: Worker, run: Run, log: Log, state: LeaderState, test_sets: TestSets, asked_to_stop: Callable[[], bool]
    ) -> None:
        self._worker, self._run, self._log, self._state, self._test_sets = worker, run, log, state, test_sets
        self._asked_to_stop = asked_to_stop
        # Whether the other workers train while this rank validates; their words of this time count, and so does the time.
        self._others_train = worker.transport.size > 1 and not worker.plan.synchronous
        # Copies, with the progress and the learning rate when they were requested.
        self._coming = deque[tuple[Future[Tensor], Progress, float]]()

    def request(self) -> None:
        """Request a copy of the current global parameters; `advance` validates it after it has arrived."""
        self._state.progress.tick(training=True)
        strategy = self._worker.strategy
        self._coming.append((strategy.copy(), copy.copy(self._state.progress), strategy.learning_rate))
        self._state.validation_pending = True

    def advance(self, wait: bool = False) -> bool:
        """Validate the copies that have arrived; with `wait`, all copies. Returns whether it validated any."""
        any_was = False
        while self._coming and (wait or self._coming[0][0].done()):
            coming, then, rate = self._coming[0]
            parameters = coming.result()
            scores = self._measure(parameters)
            if scores is None:
                break
            self._coming.popleft()  # first: the code below may raise Ended, and must not run twice for one copy
            self._state.validation_pending, any_was = bool(self._coming), True
            self._judge(scores, parameters, then, rate)
        return any_was

    def _measure(self, parameters: Tensor) -> dict[str, Scores] | None:
        """The scores of the parameters on each validation set, or None if a signal interrupted the validation."""
        progress, worker = self._state.progress, self._worker
        progress.tick(training=True)
        try:
            with worker.trace.span("validate"), worker.flat.using(parameters):
                return self._test_sets.measure(worker.model, worker.config.validation, self._interrupted)
        except Interrupted:
            return None
        finally:
            progress.tick(training=self._others_train)

    def _judge(self, sets: dict[str, Scores], parameters: Tensor, then: Progress, rate: float) -> None:
        """Log the scores, and keep the parameters if they are the best by any metric; rate: the learning rate then."""
        state, worker = self._state, self._worker
        values, signatures, failures = (
            {named(metric, name): value for name, scores in sets.items() for metric, value in getattr(scores, kind).items()}
            for kind in ("values", "signatures", "failures")
        )
        stage = sum(end < then.epoch for end in worker.config.corpus.stages)
        verdicts = state.patience.record(values, list(failures), stage)
        self._log.validation(then, values, signatures, verdicts, rate)
        for metric, reason in failures.items():
            self._log.say(f"warning: {metric} was not measured at update {then.updates}: validation.command: {reason}")
        for name, scores in sets.items():
            if scores.translations is not None:
                self._run.keep_translations(named(str(then.updates), name), scores.translations)
        best = [name for name, verdict in verdicts.items() if not verdict.stalled and not is_worst(name, verdict.best)]
        if best:
            numbers = worker.strategy.optimizer.state()[1]
            state.save_best(self._run.best(then.updates), parameters, numbers, worker.config, worker.flat)
            self._run.keep_best(then.updates, best)

    def _interrupted(self) -> bool:
        self._state.progress.tick(training=self._others_train)  # reading the clock tells the watchdog that this rank is alive
        if self._log.bar is not None:
            self._log.bar.validating()
        return self._asked_to_stop()
