"""Runs whose parameters are a ledger: how often the gradient of which batch was applied to which part of them."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from virtual import cluster

from nmt_train.common.duration import Duration
from nmt_train.config import Config
from nmt_train.corpus import CorpusConfig
from nmt_train.corpus.batch import Turn
from nmt_train.corpus.data_shard import DataShard, Position
from nmt_train.corpus.train_vocabulary import train as train_vocabulary
from nmt_train.run import checkpoint
from nmt_train.simulation.cluster import Cost, DeviceConfig, LinkConfig
from nmt_train.simulation.engine import Engine
from nmt_train.simulation.network import Network
from nmt_train.simulation.virtual_transport import VirtualTransport
from nmt_train.training.fault_tolerance import Rank
from nmt_train.training.prepared_run import opened
from nmt_train.training.worker import Worker
from nmt_train.transport import Transport

BATCHES, PARTS = 23, 12  # of an epoch; of the parameters
DEVICE = DeviceConfig(forward=Cost("10ms", "1ms"), backward=Cost("20ms", "2ms"), update=Cost("1ms", "0s"))
LINK = LinkConfig("20 kB/s", "1ms")
SHORTEST_STEP = 0.033  # seconds: forward and backward of a batch of one token


@dataclass(frozen=True)
class Numbered:
    """A batch that is nothing but its number in an epoch."""

    epoch: int
    number: int
    pairs: tuple[int, ...] = ()
    source_tokens: int = 1

    @property
    def target_tokens(self) -> int:
        return 1 + self.number % 5

    def __len__(self) -> int:
        return 1

    def to(self, device: torch.device) -> Numbered:
        return self


class Ledger(nn.Module):
    """Its parameters say, of every part of them, how often which batch's gradient was applied."""

    def __init__(self, trained: Counter[tuple[int, int]]) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(PARTS, BATCHES))
        self._trained = trained

    def loss(self, batch: Numbered) -> Tensor:
        self._trained[batch.epoch, batch.number] += 1
        counts = self.counts[:, batch.number]
        return (counts.detach() - counts).sum()  # a cost of zero, as no real one is below it


class Dealt:
    """Batches 0, 1, ... of every epoch, dealt as those of a corpus are."""

    def stream(self, data_shard: DataShard, position: Position) -> Iterator[Turn]:
        epoch, first = position.epochs, position.batches
        while True:
            mine = list(islice(data_shard.pick(epoch, iter(range(BATCHES))), first, None))
            if not mine:
                yield Turn(None, True)
            for place, (_, batch, _) in enumerate(mine):
                yield Turn(None if batch is None else Numbered(epoch, batch), place == len(mine) - 1)
            epoch, first = epoch + 1, 0

    def epochs(self, length: Duration | None) -> float:
        return math.inf

    def described(self, batch: Any) -> str:
        raise AssertionError("all gradients are finite")


@dataclass
class Outcome:
    """trained: how often workers have computed which batch of which epoch; applied (parts, batches): how often its gradient has
    been applied to which part of the parameters, in all epochs together. together: the most batches of one update.
    """

    folder: Path
    trained: Counter[tuple[int, int]]
    applied: Tensor
    together: int


def train(
    config: Config,
    nodes: list[int],
    trained: Counter[tuple[int, int]] | None = None,
    overwrite: bool = False,
    device: DeviceConfig = DEVICE,
    **faults: Any,
) -> Outcome:
    """A run on a simulated cluster where all goes wrong that `faults`, its keys, say; trained: what others did before."""
    trained = Counter() if trained is None else trained
    steps: list[Counter[int]] = []

    def make(settled: Config, transport: Transport) -> Worker:
        worker = Worker(settled, transport, Ledger(trained), Dealt())  # type: ignore[arg-type]
        steps.append(worker.strategy.steps)
        return worker

    with opened(config, False, overwrite) as ready:
        described = cluster(nodes, device, network=LINK, inside=LINK, **faults)
        engine = Engine(Network(described, PARTS * BATCHES), config.transport.deadline)

        def main(transport: VirtualTransport) -> int:
            rank = Rank(config, make, lambda ask: nullcontext(), lambda begun: nullcontext(ready))
            return rank.train(transport, ready if transport.rank == 0 else None)

        engine.run([partial(main, transport) for transport in engine.transports])
    _forget_imports()
    applied = checkpoint.load(Path(config.run) / "last").tensors("parameters")["counts"]
    return Outcome(Path(config.run), trained, applied, max([1, *(number for counts in steps for number in counts)]))


def plain(config: Config) -> Config:
    """With steps of exactly the sum of the gradients, and a vocabulary that is not trained again for every run."""
    sgd = dataclasses.replace(config.optimizer, name="sgd", learning_rate=1.0, schedule="constant", warmup=0, clip_norm=0.0)
    vocabulary = dataclasses.replace(config.corpus.vocabulary, path=_vocabulary(config.corpus))
    corpus = dataclasses.replace(config.corpus, vocabulary=vocabulary)
    return dataclasses.replace(config, optimizer=sgd, corpus=corpus, batch=dataclasses.replace(config.batch, reduction="sum"))


def _vocabulary(corpus: CorpusConfig) -> str:
    path = Path(corpus.train[0]).with_name(f"{os.getpid()}.model")
    if not path.exists():
        path.write_bytes(train_vocabulary(corpus).model)
    return str(path)


@cache
def _forget_imports() -> None:
    """Every recovery collects garbage, which is not to be looked for in all that has been imported."""
    gc.collect()
    gc.freeze()
