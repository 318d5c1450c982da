"""Rank 0 between two steps: its leader is real, its worker and what runs in the background write down what they are told."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from memory import MemoryTransport

from nmt_train.common.duration import Duration
from nmt_train.common.message import Message
from nmt_train.corpus.data_shard import DataShard, Position
from nmt_train.optim.frozen import Frozen
from nmt_train.run.folder import Run
from nmt_train.run.log import Log, LogConfig
from nmt_train.run.progress import Progress
from nmt_train.run.stopping import Patience, StopConfig
from nmt_train.strategy.staged_join import Waves
from nmt_train.strategy.state import WorkerState
from nmt_train.training import leader as module
from nmt_train.training.control import Order, Report, Reports
from nmt_train.training.leader_state import LeaderState
from nmt_train.training.rank_stats import Totals
from nmt_train.training.snapshot import RankState, Snapshot
from nmt_train.transport import Tag

COUNTED: dict[str, Any] = {**dict.fromkeys(Progress().take(), 0), "cost": 0.0}
_BARRIERS = (Order.DRAIN, Order.HAND_OVER, Order.REDISTRIBUTE)


class Rank(MemoryTransport):
    """Writes down its orders and their facts. punctual: it reaches a barrier at once. waited: what happens while it waits."""

    def __init__(self, rank: int, ranks: list[MemoryTransport], size: int, did: list[str]) -> None:
        super().__init__(rank, range(size), ranks)
        self.did, self.facts, self.punctual, self.waited = did, list[Any](), True, deque[Callable[[], None]]()
        self._place, self._reports = Position(), Reports(self) if rank else None

    def receive(self, source: int | None, tag: Tag) -> Any:
        future = super().receive(source, tag)
        future.alive = lambda: self.waited.popleft()() if self.waited else pytest.fail(f"waits for a {tag.name} in vain")
        return future

    def deliver(self, source: int, tag: Tag, message: Message) -> None:
        super().deliver(source, tag, message)
        while self._reports and self._reports.has_order():
            order, facts = self._reports.order()
            self.did.append(f"order {order}")
            self.facts.append(facts)
            if order in _BARRIERS and self.punctual:
                self.report(met=True)

    def report(self, *place: int, updates: int = 0, counted: Any = COUNTED, **more: Any) -> None:
        """Report a place in the data, as epochs and batches, or the same one as before."""
        assert self._reports, "rank 0 reports to nobody"
        self._place = Position(*place) if place else self._place
        self._reports.send(Report(counted, self._place, self._place, updates, Totals.of({}), **more))


class _Worker:
    def __init__(self, transport: Rank, config: Any, waves: Waves, plan: dict[str, bool]) -> None:
        self.transport, self.config, self.batches, self.did = transport, config, None, transport.did
        standard = {"synchronous": False, "workers_wait": False, "accumulate": 2, "per_node": False, "exchanges_once": False}
        self.plan = SimpleNamespace(waves=waves, **standard | plan)
        self.flat = SimpleNamespace(frozen=Frozen(torch.nn.Module()))
        self.trace, self.progress = SimpleNamespace(take=lambda: ()), Progress()
        self.position, self.settled_position, self.data_shard = Position(), Position(), DataShard(0, waves.first)
        self.joins_once, self.last_epoch, self.assignments = False, 10, 1
        self.strategy = SimpleNamespace(
            mid_series=False, updates=0, optimizer=SimpleNamespace(adds_updates=False),
            slices=[slice(0, 2), slice(2, 4), slice(4, 4)][: transport.size], resume=lambda: self.did.append("resume"),
            prepare_snapshot=lambda: self.did.append("prepare snapshot"),
        )  # fmt: skip

    def part(self) -> RankState:
        self.did.append("copy its part")
        return RankState({}, WorkerState(), {}, {"updates": self.strategy.updates}, self.position)

    def load_part(self, part: RankState, data_shard: DataShard, where: str) -> None:
        self.did.append(f"load {part.shard['parameters'].tolist()}")

    def begun(self, facts: dict[str, Any]) -> None:
        self.did.append("begun")

    def drain(self, leader: module.Leader) -> None:
        self.did.append("drain")

    def pause(self, leader: module.Leader) -> None:
        self.did.append("pause")

    def assign(self, data_shard: DataShard, position: Position) -> None:
        self.did.append(f"train as one of {data_shard.size}")

    def too_far_ahead(self, slowest: int) -> bool:
        return self.position.epochs > slowest + 1


class _Writer:
    """checkpoints: after which updates one is due. written: the updates of checkpoints that exist or were begun."""

    def __init__(self, did: list[str], checkpoints: Collection[int]) -> None:
        self._did, self.written = did, set[int]()
        self.due = lambda now: now.updates in checkpoints
        self.has = lambda pending: pending.own.numbers["updates"] in self.written

    def known(self, updates: int, positions: Sequence[Position]) -> None:
        self.written.add(updates)

    def begin(self, pending: Any) -> None:
        self._did.append(f"write {pending.own.numbers['updates']}")
        self.written.add(pending.own.numbers["updates"])

    def advance(self, wait: bool = False) -> None:
        self._did += ["await the writing"] * wait


class _Validation:
    """judge: called for each one that is over. lasts: it is over only when rank 0 waits for it."""

    def __init__(self, did: list[str]) -> None:
        self._did, self._asked, self.lasts = did, False, False
        self.judge: Callable[[], object] = lambda: None

    def request(self) -> None:
        self._did.append("request a validation")
        self._asked = True

    def advance(self, wait: bool = False) -> bool:
        self._did += ["finish validations"] * wait
        over = self._asked and (wait or not self.lasts)
        if over:
            self._asked = False
            self.judge()
        return over


class Led:
    """A run up to its first batch. did: what rank 0 and rank 1 did since. waits: what happens, in turn, while rank 0 waits.

    checkpoint: the update from whose checkpoint it continues. started: if not, rank 0 has not called `start_first_batch`, and
    `did` holds what came before it. plan: of the worker.
    """

    def __init__(
        self, folder: Path, patch: pytest.MonkeyPatch, ranks: int = 2, checkpoints: Collection[int] = (), stop: str = "9u",
        patience: int = 0, validate: str | None = None, recovery: str | None = None, waves: str = "",
        checkpoint: int | None = None, started: bool = True, **plan: bool,
    ) -> None:  # fmt: skip
        self.did, made = list[str](), list[MemoryTransport]()
        own, *others = (Rank(rank, made, ranks, self.did if rank < 2 else []) for rank in range(ranks))
        made.extend([own, *others])
        self.waits, self.others, own.fault_tolerant = own.waited, others, recovery is not None
        config = SimpleNamespace(
            stop=StopConfig(after=[Duration.parse(stop)], patience=patience), log=LogConfig(),
            validation=SimpleNamespace(every=validate and Duration.parse(validate)),
            recovery=SimpleNamespace(every=Duration.parse(recovery or "1u")),
        )  # fmt: skip
        self.worker = _Worker(own, config, Waves.parse(waves) if waves else Waves(ranks), plan)
        self.writer, self.validation = _Writer(self.did, checkpoints), _Validation(self.did)
        patch.setattr(module, "CheckpointWriter", lambda *_, disk: self.writer)
        patch.setattr(module, "BackgroundValidation", lambda *_: self.validation)
        patch.setattr("nmt_train.transport.local._LOOK", 0)  # what has not come yet will not come by itself
        nothing: Any = None
        self.state, self.log = LeaderState(Progress(), Patience(config.stop), nothing), io.StringIO()
        log = Log(self.log, io.StringIO())
        self.leader = module.Leader(self.worker, Run(folder), log, self.state, nothing)  # type: ignore[arg-type]
        self.waits.extend([partial(other.report, met=True) for other in others] * 2)
        numbers = {"updates": checkpoint or 0, "torch": {}}
        stages = [] if checkpoint is None else [[Position() for _ in range(ranks)]]
        self.leader.begin(Snapshot({"parameters": torch.arange(4.0)}, numbers, [], [], stages))
        if started:
            self.leader.start_first_batch(recovered=False)
            self.did.clear()

    def step(self, updated: bool = True) -> bool:
        """Whether the worker took another step."""
        if goes_on := self.leader.should_continue():
            self.worker.strategy.updates += updated
            self.leader.step_done(updated)
        return goes_on
