"""Simulates only the timing of training: the same workers and servers run, but vectors have sizes and no values."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from nmt_train.common.duration import Duration
from nmt_train.common.message import Message
from nmt_train.config import Config
from nmt_train.corpus.batch import Turn
from nmt_train.corpus.batches import Batches
from nmt_train.corpus.data_shard import DataShard, Position
from nmt_train.corpus.store import Stores
from nmt_train.corpus.vocabulary import Vocabulary
from nmt_train.model import ModelConfig
from nmt_train.model.transformer import Transformer
from nmt_train.modes.resolve import resolve
from nmt_train.run.folder import METRICS, TIMING
from nmt_train.simulation.cluster import ClusterConfig
from nmt_train.simulation.compatibility import check
from nmt_train.simulation.engine import Engine
from nmt_train.simulation.memory import held
from nmt_train.simulation.network import Network
from nmt_train.simulation.upkeep import Sizes, Speed, share
from nmt_train.simulation.virtual_transport import VirtualTransport
from nmt_train.trace import Span, write_spans
from nmt_train.training.worker import Worker
from nmt_train.transport import TRAINING, Tag

Shapes = Sequence[tuple[int, ...]]  # of the parameters of a model
_PIECES = 8  # of a vocabulary that does not matter
_SETTLING = 5  # first steps, which are not measured: ranks start in lockstep and drift apart


def shapes_of(config: Config, pieces: int | Sequence[int]) -> Shapes:
    """The shapes of the model's trained parameters. pieces: as in `Transformer`."""
    with torch.device("meta"):
        return [tuple(part.shape) for part in Transformer(config.model, pieces).parameters() if part.requires_grad]


def model_and_batches(config: Config, vocabulary: Vocabulary, stores: Stores) -> tuple[Shapes, list[int]]:
    """The shapes of the model's parameters, and the target tokens of each batch of an epoch."""
    batches = Batches(stores, config.corpus, config.batch, vocabulary, config.seed)
    return shapes_of(config, vocabulary.size), batches.target_tokens()


def _layer_matrices(config: ModelConfig, shapes: Shapes) -> dict[int, int]:
    """`Transformer.layer_matrices` by the numbers of the parameters; none if the shapes are those of another model."""
    with torch.device("meta"):
        model = Transformer(config, _PIECES)
    matrices, parameters = model.layer_matrices(), [its for its in model.named_parameters() if its[1].requires_grad]
    found = {number: matrices[name] for number, (name, _) in enumerate(parameters) if name in matrices}
    same = len(parameters) == len(shapes) and all(shapes[number] == parameters[number][1].shape for number in found)
    return found if same else {}


def count(shapes: Shapes) -> int:
    """The total number of elements of tensors of these shapes."""
    return sum(math.prod(shape) for shape in shapes)


@dataclass(frozen=True)
class RankTiming:
    """The timing of one rank. seconds: when its last step ended on the virtual clock, which starts at 0.

    words_per_second: target tokens, without the first steps. spent: seconds by thread and span name. sent: bytes of
    training messages, without the initial parameters. spans: recorded if tracing is on. period: steps between two exchanges.
    memory: bytes of its vectors (see memory.py). state: bytes of its part of a checkpoint.
    """

    node: int
    words_per_second: float
    seconds: float
    spent: dict[str, dict[str, float]]
    sent: float
    spans: list[Span]
    period: float = 1.0
    memory: float = 0.0
    state: float = 0.0

    def share(self, *names: str) -> float:
        """The fraction of the time that the worker's main thread spent in spans of these names."""
        main = self.spent["MainThread"]
        return sum(main.get(name, 0.0) for name in names) / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class Timing:
    """The timing of all ranks that train a model of `elements` elements for `seconds` seconds.

    upkeep: the largest share of the time that checkpoints and recovery copies take (see upkeep.py).
    """

    ranks: list[RankTiming]
    seconds: float
    elements: int
    upkeep: float = 0.0

    @property
    def words_per_second(self) -> float:
        """Without checkpoints and recovery copies."""
        return sum(rank.words_per_second for rank in self.ranks)

    @property
    def period(self) -> float:
        """Steps between two exchanges of a worker, on average."""
        return sum(rank.period for rank in self.ranks) / len(self.ranks)

    def table(self) -> str:
        """A table with one line per machine and one line for all machines."""
        lines = ["node   ranks   words/s   computing   exchanging   sent MB/s"]
        for node in dict.fromkeys(rank.node for rank in self.ranks):
            lines.append(self._line(str(node), [rank for rank in self.ranks if rank.node == node]))
        lines.append(self._line("all", self.ranks))
        if self.upkeep:
            lines.append(f"checkpoints and recovery copies: at most {self.upkeep:.1%} of the time, not included")
        return "\n".join(lines) + "\n"

    def _line(self, name: str, ranks: list[RankTiming]) -> str:
        words = sum(rank.words_per_second for rank in ranks)
        computing = sum(rank.share("forward", "backward") for rank in ranks) / len(ranks)
        exchanging = sum(rank.share("sync", "swap") for rank in ranks) / len(ranks)
        sent = sum(rank.sent for rank in ranks) / 1e6 / max(self.seconds, 1e-9)
        return f"{name:<7}{len(ranks):<8}{words:<10,.0f}{computing:<12.1%}{exchanging:<13.1%}{sent:.2f}"

    def write(self, folder: Path) -> None:
        """Write `timing.json`, and `trace/` if spans were recorded."""
        values = {"seconds": self.seconds, "words_per_second": self.words_per_second, "elements": self.elements,
                  "upkeep": self.upkeep}  # fmt: skip
        ranks = [{key: value for key, value in vars(rank).items() if key != "spans"} for rank in self.ranks]
        (folder / TIMING).write_text(json.dumps({**values, "ranks": ranks}) + "\n", encoding="utf-8")
        if any(rank.spans for rank in self.ranks) or not (folder / METRICS).exists():  # keep the trace of a training run
            for earlier in (folder / "trace").glob("rank*.jsonl"):
                earlier.unlink()
        for number, rank in enumerate(self.ranks):
            write_spans(folder / "trace", number, rank.node, rank.spans)


class _Silent(nn.Module):
    """A model with parameters of these shapes; its loss is always zero and takes no time to compute.

    joined: as `Transformer.layer_matrices`, but by the numbers of the parameters.
    """

    def __init__(self, shapes: Shapes, joined: Mapping[int, int]) -> None:
        super().__init__()
        self._joined = {f"parts.{number}": projections for number, projections in joined.items()}
        self.parts = nn.ParameterList(torch.empty(shape, device="meta") for shape in shapes)

    def loss(self, batch: _Length) -> Tensor:
        return torch.zeros((), requires_grad=True)

    def layer_matrices(self) -> Mapping[str, int]:
        return self._joined

    def separate_lookups(self, gradient: Tensor) -> None:
        """Gradients have no values, so there is nothing to separate but the times, for which the strategy cares."""


@dataclass(frozen=True)
class _Length:
    """Replaces a batch; only its number of target tokens is known."""

    target_tokens: int
    source_tokens: int = 0

    def __len__(self) -> int:
        return 1

    def to(self, device: torch.device) -> _Length:
        return self


class _Lengths:
    """Batches of the given lengths, assigned to workers in round-robin order; the list of lengths repeats endlessly."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def stream(self, data_shard: DataShard, position: Position) -> Iterator[Turn]:
        place = data_shard.rank
        while True:
            yield Turn(_Length(self._tokens[place % len(self._tokens)]), False)
            place += data_shard.size

    def epochs(self, length: Duration | None) -> float:
        return math.inf

    def described(self, batch: _Length) -> str:
        raise AssertionError("a gradient without values is finite")


class _Steps:
    """Makes a worker take `steps` steps, and measures its speed from one exchange, after the first few steps, to the last one.

    If there are no two such exchanges, it measures from the first of these steps to the last one. If exchanges are
    synchronous, workers wait as in training: for an order before a step, and rank 0 for all reports after an exchange.
    """

    def __init__(self, worker: Worker, steps: int) -> None:
        self.worker, self._steps, self._done = worker, steps, 0
        self.end = worker.transport.now()
        # Seconds and words: after each step but the first ones, and after those steps among them that exchanged.
        self._ends: list[tuple[float, int]] = [(self.end, 0)] if steps == 1 else []
        self._exchanged: list[tuple[float, int]] = []
        self.exchanges = 0
        self._synchronous = worker.plan.synchronous

    def should_continue(self) -> bool:
        more = self._done < self._steps
        if more and self._synchronous and not self.worker.strategy.mid_series:
            self._order()
        return more

    def _order(self) -> None:
        transport = self.worker.transport
        if transport.rank:
            transport.receive(0, Tag.CONTROL).result()
            return
        for rank in range(1, transport.size):
            transport.send(rank, Tag.CONTROL, Message())

    def _report(self) -> None:
        transport = self.worker.transport
        if transport.rank:
            transport.send(0, Tag.REPORT, Message())
            return
        for _ in range(1, transport.size):
            transport.receive(None, Tag.REPORT).result()

    def step_done(self, updated: bool) -> None:
        self._done += 1
        self.end = self.worker.transport.now()
        self.exchanges = sum(self.worker.strategy.steps.values())
        if self._done >= min(_SETTLING, self._steps - 1):
            for marks in (self._ends, self._exchanged)[: 1 + updated]:
                marks.append((self.end, self.worker.progress.tokens))
        if updated and self._synchronous:
            self._report()

    def skipped(self, what: str) -> None:
        raise AssertionError("a gradient without values is finite")

    @property
    def words_per_second(self) -> float:
        marks = self._exchanged if len(self._exchanged) > 1 else self._ends
        (start, before), (end, after) = marks[0], marks[-1]
        return (after - before) / max(end - start, 1e-9)


def measure(config: Config, cluster: ClusterConfig, shapes: Shapes, tokens: Sequence[int], steps: int) -> Timing:
    """Let every rank of `cluster` take `steps` steps with parameters of these `shapes`.

    tokens: number of target tokens of each batch. Raises UserError if the mode does not work with these ranks.
    """
    check(cluster, config)
    config = dataclasses.replace(config, precision="fp32")
    cluster = dataclasses.replace(cluster, crashes=[], kills=[])  # every rank takes all of its steps
    elements = count(shapes)
    joined = _layer_matrices(config.model, shapes) if config.optimizer.name == "muon" else {}
    network = Network(cluster.with_codec(resolve(config, cluster.ranks())), elements, only_training=True)
    engine = Engine(network, config.transport.deadline, random=False)
    coordinator: list[_Steps] = []

    def run(transport: VirtualTransport) -> None:
        worker = Worker(config, transport, _Silent(shapes, joined), _Lengths(tokens))
        mine = _Steps(worker, steps)
        coordinator.append(mine)
        worker.strategy.refresh()
        worker.run(mine)
        worker.strategy.drain()  # so that no other rank waits for this one

    engine.run([partial(run, transport) for transport in engine.transports])
    now = engine.transports[0].now()
    coordinator.sort(key=lambda its: its.worker.transport.rank)
    sizes = [Sizes.of(its.worker) for its in coordinator]
    ranks = [
        RankTiming(
            node=its.worker.transport.nodes[its.worker.transport.rank],
            words_per_second=its.words_per_second,
            spent={thread: dict(spans) for thread, spans in its.worker.trace.spent.items()},
            sent=sum(its.worker.transport.sent[tag][1] for tag in TRAINING) * engine.network.scale,
            spans=its.worker.trace.take(),
            seconds=its.end,
            period=steps / max(1, its.exchanges),
            memory=held(its.worker.strategy) * engine.network.scale,
            state=size.state,
        )
        for its, size in zip(coordinator, sizes, strict=True)
    ]
    timing = Timing(ranks, now, elements)
    words = timing.words_per_second
    updates = max(its.worker.strategy.updates for its in coordinator) / max(now, 1e-9)
    speed = Speed(updates, words, words / sum(tokens))
    return dataclasses.replace(timing, upkeep=share(config, cluster, sizes, network.scale, speed))
