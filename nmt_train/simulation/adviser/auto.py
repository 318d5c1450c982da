"""The adviser of `mode: auto`: measures the machines of a job in some seconds, and compares the modes on them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import torch

from nmt_train.common.errors import UserError
from nmt_train.common.yaml_file import flatten
from nmt_train.config import Config, plain
from nmt_train.corpus.store import Stores
from nmt_train.corpus.vocabulary import Vocabulary
from nmt_train.modes.auto import part_of_mode, with_mode
from nmt_train.run.folder import MACHINES
from nmt_train.simulation.adviser.compare import WORTH, Comparison, Row, compare, part_of
from nmt_train.simulation.adviser.measure import cluster_file, machines
from nmt_train.simulation.adviser.words_needed import Choice, measured
from nmt_train.simulation.cluster import ClusterConfig
from nmt_train.simulation.cluster_file import parse
from nmt_train.simulation.profile import Effort, nothing
from nmt_train.simulation.timing import model_and_batches
from nmt_train.training.auto_mode import Advice
from nmt_train.training.worker import Make
from nmt_train.transport import Transport

_EFFORT, _SECONDS = Effort(steps=3, settling=1, rounds=1), 1.0  # of each measurement of a bandwidth
_LONGEST = 60.0  # seconds after which no further choice is simulated
_MANY = 16  # more ranks are simulated faster, but less exactly
_ALONE = Choice("single", {})


class AutoAdviser:
    """Compares the modes whose words needed were measured (docs/choosing.md), on all machines and on one."""

    def __init__(self, config: Config, vocabulary: Vocabulary, stores: Stores) -> None:
        self._config, self._vocabulary, self._stores = with_mode(config, _ALONE.mode, {}), vocabulary, stores
        self._seconds, self._warnings = 0.0, list[str]()

    def measure(self, transport: Transport, own: torch.device, make: Make) -> str:
        start = time.perf_counter()
        found = machines(self._config, make, own, transport, _EFFORT, _SECONDS, nothing)
        for counts in (transport.sent, transport.received):
            counts.clear()  # training counts its own messages
        self._seconds = time.perf_counter() - start
        if found is None:
            return ""
        self._warnings = [found.warning] if found.warning else []
        return cluster_file(found)

    def choose(self, cluster: str) -> Advice:
        start = time.perf_counter()
        found, best = self._compared(parse(cluster))
        took = f"measured the machines in {self._seconds:.0f} s, compared modes in {time.perf_counter() - start:.0f} s"
        sentences = [
            f"{took}: {MACHINES}, compare.json and compare.png",
            f"chose {best.choice.options}: {_times(best, best)}{_sync(best, found)}",
            *self._warnings,
        ]
        if best.machines > 1 and best.estimate < WORTH:
            sentences.append(f"warning: one machine alone would be {_alone(best.estimate)}")
        return Advice(self._with(best.choice), sentences, found.write)

    def compare(self, cluster: str, devices: Sequence[int], config: Config) -> str:
        try:
            there = parse(cluster)
        except UserError as error:
            return f"{MACHINES}: {error}"
        if len(devices) != len(there.nodes) or any(left > all for left, all in zip(devices, there.nodes, strict=True)):
            return "these are not the machines that were measured; nmt-simulate --measure and --compare say what is best now"
        try:
            longest = min(_LONGEST, config.transport.deadline / 2)  # the other ranks are waiting
            found, best = self._compared(part_of(there, devices), longest)
        except UserError as error:
            return str(error)
        where = f"with {sum(devices)} device{'s' * (sum(devices) > 1)}"
        own = part_of_mode(flatten(plain(config)))
        rows = [row for row in found.rows if row.machines == best.machines]
        now = next((row for row in rows if part_of_mode(flatten(plain(self._with(row.choice)))) == own), None)
        if now is best:
            return f"{where}, {config.mode} is still the best mode: {_times(best, best)}{_sync(best, found)}"
        against = f"; now {_times(now, best)}" if now is not None else ""
        options, before = best.choice.options, config.batch.accumulate
        if (accumulate := self._with(best.choice).batch.accumulate) != before:  # which a run does not change of itself
            options += f"{f' --batch.accumulate {accumulate}' * (accumulate == 1)} --force"
        return (
            f"{where}, {best.choice.mode} would be best ({_times(best, best)}{against}); training continues with"
            f" {config.mode}: to change, stop it and start it again with {options}"
        )

    def _compared(self, cluster: ClusterConfig, longest: float = _LONGEST) -> tuple[Comparison, Row]:
        """The comparison, and its best row on all machines. Raises UserError if there is none."""
        every = len(cluster.nodes)
        if len(cluster.ranks()) > _MANY:
            cluster = dataclasses.replace(cluster, transfers="turns")
        wanted = [(choice, size) for size in sorted({1, every}) for choice in (_ALONE, *measured())]
        shapes, tokens = model_and_batches(self._config, self._vocabulary, self._stores)
        found = compare(self._config, cluster, shapes, tokens, wanted, longest=longest)
        if (best := found.best_on(every)) is None:
            refused = "; ".join(f"{name}: {why}" for name, why in found.refused.items())
            raise UserError(f"mode: auto knows no mode for these machines ({refused or 'not enough memory'}); name a mode")
        return found, best

    def _with(self, choice: Choice) -> Config:
        return with_mode(self._config, choice.mode, choice.settings)


def _alone(estimate: float) -> str:
    """How fast one machine is compared with all. estimate: how fast all are compared with one."""
    return f"{1 / estimate:.1f} times as fast" if estimate < 0.95 else "nearly as fast, or as fast"


def _times(row: Row, best: Row) -> str:
    """How soon a row learns the same: relative to one machine, or on one machine, to the best row."""
    if row.machines > 1:
        return f"{row.said} times one machine"
    return f"{row.words_per_second:,.0f} words/s" if row is best else f"{row.estimate / best.estimate:.2f} times as fast"


def _sync(best: Row, found: Comparison) -> str:
    """What mode sync would do, if it is not the best."""
    rows = (row for row in found.rows if row.machines == best.machines and row.choice.mode == "sync")
    sync = next(rows, None)
    return f"; {sync.choice.options}: {_times(sync, best)}" if sync is not None and best.choice.mode != "sync" else ""
