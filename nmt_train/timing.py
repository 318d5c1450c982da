"""Only the timing of training on a simulated cluster: the same workers and servers, but vectors have sizes and no values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nmt_train.cluster import ClusterConfig
from nmt_train.config import Config
from nmt_train.corpus.deal import Deal, Position
from nmt_train.train import Worker
from nmt_train.wire.network import Network
from nmt_train.wire.virtual import Engine, VirtualWire

_SETTLING = 5  # steps that are not counted: all ranks begin at once, and that wears off


@dataclass(frozen=True)
class Timing:
    """What training would do. words_per_second: by rank; spent: seconds of each rank by thread and name of span, of `seconds`
    in all; sent: bytes by rank, as charged.
    """

    words_per_second: list[float]
    spent: list[dict[str, dict[str, float]]]
    sent: list[float]
    seconds: float
    workers: list[Worker]


class _Silent(nn.Module):
    """A model of a size, whose cost is nothing and takes no time to compute."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.parameter = nn.Parameter(torch.empty(elements, device="meta"))

    def loss(self, batch: _Length) -> Tensor:
        return torch.zeros((), requires_grad=True)


@dataclass(frozen=True)
class _Length:
    """Of a batch, only how long it is."""

    target_tokens: int
    source_tokens: int = 0

    def __len__(self) -> int:
        return 1

    def to(self, device: torch.device) -> _Length:
        return self


class _Lengths:
    """Batches of the given lengths, dealt to workers in turn and again and again."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def stream(self, deal: Deal, position: Position) -> Iterator[tuple[_Length, bool]]:
        place = deal.rank
        while True:
            yield _Length(self._tokens[place % len(self._tokens)]), False
            place += deal.size


class _Steps:
    """Duties of a worker that takes a number of steps and measures from the first that counts."""

    def __init__(self, worker: Worker, steps: int) -> None:
        self._worker, self._steps, self._done = worker, steps, 0
        self.start = self.end = worker.wire.now()
        self._before: list[int] = [0]

    def go_on(self) -> bool:
        return self._done < self._steps

    def step_done(self, updated: bool) -> None:
        self._done += 1
        progress, self.end = self._worker.progress, self._worker.wire.now()
        if self._done == min(_SETTLING, self._steps - 1):
            self.start, self._before = self.end, [progress.tokens]

    def skipped(self, what: str) -> None:
        raise AssertionError("a gradient without values is finite")

    @property
    def words_per_second(self) -> float:
        return (self._worker.progress.tokens - self._before[0]) / max(self.end - self.start, 1e-9)


def measure(config: Config, cluster: ClusterConfig, elements: int, tokens: Sequence[int], steps: int) -> Timing:
    """Let every rank of `cluster` take `steps` steps with batches of so many target tokens and a model of `elements`.

    UserError if the mode is wrong for these ranks.
    """
    config = dataclasses.replace(config, precision="fp32")
    engine = Engine(Network(cluster, elements, config.wire.deadline), random=False)
    workers: list[Worker] = []
    duties: list[_Steps] = []

    def run(wire: VirtualWire) -> None:
        worker = Worker(config, wire, _Silent(elements), _Lengths(tokens))  # type: ignore[arg-type]
        mine = _Steps(worker, steps)
        workers.append(worker)
        duties.append(mine)
        worker.schedule.refresh()
        worker.run(mine)

    engine.run([lambda wire=wire: run(wire) for wire in engine.wires])  # type: ignore[misc]
    order = sorted(range(len(workers)), key=lambda place: workers[place].wire.rank)
    return Timing(
        words_per_second=[duties[place].words_per_second for place in order],
        spent=[{thread: dict(spans) for thread, spans in workers[place].trace.spent.items()} for place in order],
        sent=[sum(count[1] for count in wire.sent.values()) * engine.network.scale for wire in engine.wires],
        seconds=engine.wires[0].now(),
        workers=[workers[place] for place in order],
    )
