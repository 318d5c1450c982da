"""Writes the checkpoints of a run, each as soon as all ranks have sent their parts of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nmt_train.common.errors import NotFinite
from nmt_train.corpus.data_shard import Position
from nmt_train.run.folder import Run
from nmt_train.training.leader_state import LeaderState
from nmt_train.training.snapshot import PendingSnapshot
from nmt_train.training.worker import Worker


class CheckpointWriter:
    def __init__(self, worker: Worker, run: Run, state: LeaderState) -> None:
        self._worker, self._run, self._state = worker, run, state
        self._saved: tuple[int, Sequence[Position]] | None = None  # updates and positions of the newest checkpoint
        self._coming: tuple[PendingSnapshot, dict[str, Any]] | None = None  # the snapshot to write, and its facts

    def known(self, updates: int, positions: Sequence[Position]) -> None:
        """Record that the checkpoint from which training continues exists already."""
        self._saved = (updates, positions)

    def has(self, pending: PendingSnapshot) -> bool:
        """Whether exactly this snapshot has been written as a checkpoint, or will be."""
        return self._saved == (pending.own.numbers["updates"], pending.positions)

    def begin(self, pending: PendingSnapshot) -> None:
        """Write a checkpoint now, or as soon as all of its parts have arrived."""
        self._coming = (pending, self._state.facts(pending.own.numbers, self._worker.config))
        self._saved = (pending.own.numbers["updates"], pending.positions)
        self.advance()

    def advance(self, wait: bool = False) -> None:
        """Write the pending checkpoint if all of its parts have arrived; with `wait`, wait for them.

        Raises NotFinite if its parameters are not finite, and UserError if it cannot be written.
        """
        if self._coming is None or not (wait or self._coming[0].complete()):
            return
        (pending, facts), self._coming = self._coming, None
        update = pending.own.numbers["updates"]
        progress = self._state.progress
        progress.tick(training=True)
        snapshot = pending.snapshot()
        if not bool(snapshot.vectors["parameters"].isfinite().all()):
            raise NotFinite(
                f"update {update}: parameters are not finite; earlier checkpoints are intact: lower optimizer.learning_rate or"
                " lengthen optimizer.warmup"
            )
        self._state.save(self._run.checkpoint(update), snapshot, facts, self._worker.flat)
        self._run.link("last", self._run.checkpoint(update))
        self._run.prune(self._worker.config.checkpoint.keep)
        progress.tick(training=False)
