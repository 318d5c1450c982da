"""Distribute the batches of an epoch: batch i goes to worker i mod N. Across restarts, each batch is trained on once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass
class Position:
    """The progress of one worker: its completed epochs, and its completed batches of the current epoch."""

    epochs: int = 0
    batches: int = 0

    def advance(self, last: bool) -> None:
        """Count one completed batch; `last` says whether it was the worker's last batch of the epoch."""
        self.epochs, self.batches = (self.epochs + 1, 0) if last else (self.epochs, self.batches + 1)


@dataclass(frozen=True)
class DataShard:
    """The share of worker `rank` among `size` workers; a worker with rank >= `size` has no share.

    stages: the positions at which the workers of earlier distributions stopped, oldest first. The batches that they completed
    in an epoch are left out; only the remaining batches are distributed. even: every worker gets the same number of batches;
    the last one may be None.
    """

    rank: int = 0
    size: int = 1
    stages: Sequence[Sequence[Position]] = field(default=())
    even: bool = False

    @property
    def idle(self) -> bool:
        """Whether the worker has not joined yet."""
        return self.rank >= self.size

    def pick(self, epoch: int, batches: Iterator[T]) -> Iterator[tuple[int, T | None, T]]:
        """Yield each batch of this worker in `epoch`: its number, itself, and the batch of worker 0 in the same turn.

        If `even`, the number -1 with None for the batch may follow.
        """
        left = self._left(epoch, batches) if self.stages else enumerate(batches)
        while turn := list(itertools.islice(left, self.size)):
            first = turn[0][1]
            if self.rank < len(turn):
                yield *turn[self.rank], first
            elif self.even and len(turn) < self.size:
                yield -1, None, first

    def _left(self, epoch: int, batches: Iterator[T]) -> Iterator[tuple[int, T]]:
        """The numbered batches of `epoch` that no earlier stage has completed."""
        seen = [0] * len(self.stages)
        for number, batch in enumerate(batches):
            for stage, positions in enumerate(self.stages):
                turn, worker = divmod(seen[stage], len(positions))
                seen[stage] += 1
                if (epoch, turn) < (positions[worker].epochs, positions[worker].batches):
                    break  # this stage completed this batch
            else:
                yield number, batch


def resume(
    rank: int, stages: Sequence[Sequence[Position]], size: int, redistribute: bool = False
) -> tuple[DataShard, Position]:
    """Return the data shard and the position from which worker `rank` of `size` continues.

    stages: the last one holds the positions where the workers stopped. redistribute: divide the remaining batches again, even
    if the number of workers is unchanged.
    """
    if not stages or rank >= size:
        return DataShard(rank, size), Position()
    *earlier, last = stages
    if len(last) == size and not redistribute:
        return DataShard(rank, size, earlier), Position(last[rank].epochs, last[rank].batches)
    first = min(position.epochs for position in last)
    # Drop each stage whose workers all stopped before epoch `first`: it has no completed batches to leave out.
    open_ones = [stage for stage in stages if max(position.epochs for position in stage) >= first]
    return DataShard(rank, size, open_ones), Position(first, 0)


def plain(stages: Sequence[Sequence[Position]]) -> list[list[list[int]]]:
    """Convert stages to plain lists for a message; `from_plain` reads them back."""
    return [[[position.epochs, position.batches] for position in stage] for stage in stages]


def from_plain(stages: Sequence[Sequence[Sequence[int]]]) -> list[list[Position]]:
    return [[Position(*position) for position in stage] for stage in stages]
