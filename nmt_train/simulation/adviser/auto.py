"""The adviser of `mode: auto`: measures the machines of a job in some seconds, and compares the modes on them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from nmt_train.common import atomic_file as durable
from nmt_train.common.errors import UserError
from nmt_train.config import Config, plain
from nmt_train.corpus.store import Stores
from nmt_train.corpus.vocabulary import Vocabulary
from nmt_train.distributed.transport import Transport
from nmt_train.modes.auto import part_of_mode, with_mode
from nmt_train.simulation.adviser.compare import WORTH, Comparison, Row, compare, some
from nmt_train.simulation.adviser.measure import cluster_file, machines
from nmt_train.simulation.adviser.words_needed import Choice, measured
from nmt_train.simulation.cluster import ClusterConfig, parse
from nmt_train.simulation.profile import Effort
from nmt_train.simulation.timing import shapes_of, target_tokens
from nmt_train.training.auto_mode import CLUSTER, Advice
from nmt_train.training.worker import Make

_EFFORT, _SECONDS = Effort(steps=3, settling=1, rounds=1), 1.0  # of each measurement of a bandwidth
_ALONE = Choice("single", {})


class AutoAdviser:
    """Compares the modes whose words needed were measured (docs/choosing.md), on all machines and on one."""

    def __init__(self, config: Config, vocabulary: Vocabulary, stores: Stores) -> None:
        self._config = with_mode(config, _ALONE.mode, {})
        self._shapes, self._tokens = shapes_of(config, vocabulary), target_tokens(config, stores, vocabulary)
        self._seconds, self._warnings = 0.0, list[str]()

    def measure(self, transport: Transport, own: torch.device, make: Make) -> str:
        start = time.perf_counter()
        found = machines(self._config, make, own, transport, _EFFORT, _SECONDS)
        for counts in (transport.sent, transport.received):
            counts.clear()  # training counts its own messages
        self._seconds = time.perf_counter() - start
        if found is None:
            return ""
        self._warnings = [found.warning] if found.warning else []
        return cluster_file(found)

    def choose(self, machines: str) -> Advice:
        start = time.perf_counter()
        found, best = self._compared(parse(machines))
        took = f"measured the machines in {self._seconds:.0f} s, compared modes in {time.perf_counter() - start:.0f} s"
        sentences = [
            f"{took}: {CLUSTER}, compare.json and compare.png",
            f"chose {best.choice.options}: {_against(best, found)}",
        ]
        if best.machines > 1 and best.estimate < WORTH:
            sentences.append("warning: one machine alone would be as fast")
        sentences += self._warnings

        def write(folder: Path) -> None:
            durable.write(folder / CLUSTER, machines.encode())
            found.write(folder)

        return Advice(self._with(best.choice), sentences, write)

    def compare(self, machines: str, devices: Sequence[int], config: Config) -> str:
        cluster = parse(machines)
        if len(devices) != len(cluster.nodes) or any(left > all for left, all in zip(devices, cluster.nodes, strict=True)):
            return "these are not the machines that were measured; nmt-simulate --measure and --compare say what is best now"
        try:
            found, best = self._compared(some(cluster, devices))
        except UserError as error:
            return str(error)
        where = f"with {sum(devices)} device{'s' * (sum(devices) > 1)}"
        own = part_of_mode(plain(config))
        rows = [row for row in found.rows if row.machines == best.machines]
        now = next((row for row in rows if part_of_mode(plain(self._with(row.choice))) == own), None)
        if now is best:
            return f"{where}, {config.mode} is still the best mode: {_against(best, found)}"
        against = f"; now {_times(now, best)}" if now is not None else ""
        return (
            f"{where}, {best.choice.options} would be best ({_times(best, best)}{against}); training continues with"
            f" {config.mode}: to change, stop it and start it again with these options"
        )

    def _compared(self, cluster: ClusterConfig) -> tuple[Comparison, Row]:
        """The comparison, and its best row on all machines. Raises UserError if there is none."""
        every = len(cluster.nodes)
        wanted = [(choice, size) for size in sorted({1, every}) for choice in (_ALONE, *measured())]
        found = compare(self._config, cluster, self._shapes, self._tokens, wanted)
        if (best := found.best_on(every)) is None:
            refused = "; ".join(f"{name}: {why}" for name, why in found.refused.items())
            raise UserError(f"mode: auto knows no mode for these machines ({refused or 'not enough memory'}); name a mode")
        return found, best

    def _with(self, choice: Choice) -> Config:
        return with_mode(self._config, choice.mode, choice.settings)


def _times(row: Row, best: Row) -> str:
    """How soon a row learns the same: relative to one machine, or on one machine, to the best row."""
    if row.machines > 1:
        return f"{row.said} times one machine"
    return f"{row.words_per_second:,.0f} words/s" if row is best else f"{row.estimate / best.estimate:.2f} times as fast"


def _against(best: Row, found: Comparison) -> str:
    """The speed of the best row, and of the first one in another mode."""
    others = (row for row in found.rows if row.machines == best.machines and row.choice.mode != best.choice.mode)
    second = next(others, None)
    return _times(best, best) + (f"; next best: {second.choice.options}, {_times(second, best)}" if second is not None else "")
