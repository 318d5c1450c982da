"""How the batches of an epoch are dealt to workers: batch i to worker i mod N, each to exactly one, also across restarts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass
class Position:
    """How far one worker has come: epochs completed, and batches of its share of the epoch under way."""

    epochs: int = 0
    batches: int = 0

    def advance(self, last: bool) -> None:
        """One batch is done, the `last` of the worker's share of the epoch or not."""
        self.epochs, self.batches = (self.epochs + 1, 0) if last else (self.epochs, self.batches + 1)


@dataclass(frozen=True)
class DataShard:
    """The share of worker `rank` of `size`; a worker from `size` on has none.

    stages: positions of the workers of earlier starts with other numbers of workers, oldest first; what they had done of an
    epoch is left out, and only the rest is dealt. even: every worker gets equally many, the last of them perhaps None.
    """

    rank: int = 0
    size: int = 1
    stages: Sequence[Sequence[Position]] = field(default=())
    even: bool = False

    @property
    def idle(self) -> bool:
        """Whether the worker has not joined yet."""
        return self.rank >= self.size

    def pick(self, epoch: int, batches: Iterator[T]) -> Iterator[tuple[int, T | None]]:
        """This worker's batches of `epoch`, with their numbers in the epoch."""
        seen = [0] * (len(self.stages) + 1)
        for number, batch in enumerate(batches):
            for stage, positions in enumerate(self.stages):
                turn, worker = divmod(seen[stage], len(positions))
                seen[stage] += 1
                if (epoch, turn) < (positions[worker].epochs, positions[worker].batches):
                    break  # done then
            else:
                if seen[-1] % self.size == self.rank:
                    yield number, batch
                seen[-1] += 1
        if self.even and 0 < seen[-1] % self.size <= self.rank:
            yield -1, None


def resume(rank: int, stages: Sequence[Sequence[Position]], size: int, anew: bool = False) -> tuple[DataShard, Position]:
    """The deal and place from which worker `rank` of `size` goes on; the last of `stages` is where the workers stopped.

    anew: what is left is dealt out again even if there are as many workers as before.
    """
    if not stages or rank >= size:
        return DataShard(rank, size), Position()
    *earlier, last = stages
    if len(last) == size and not anew:
        return DataShard(rank, size, earlier), Position(last[rank].epochs, last[rank].batches)
    first = min(position.epochs for position in last)
    # Stages whose every worker is past a finished epoch have nothing more to leave out.
    open_ones = [stage for stage in stages if max(position.epochs for position in stage) >= first]
    return DataShard(rank, size, open_ones), Position(first, 0)


def plain(stages: Sequence[Sequence[Position]]) -> list[list[list[int]]]:
    """Stages for a message; `from_plain` reads them back."""
    return [[[position.epochs, position.batches] for position in stage] for stage in stages]


def from_plain(stages: Sequence[Sequence[Sequence[int]]]) -> list[list[Position]]:
    return [[Position(*position) for position in stage] for stage in stages]
