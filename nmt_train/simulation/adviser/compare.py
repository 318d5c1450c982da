"""Compares all modes on a simulated cluster: how many times sooner than one machine each learns the same model."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from nmt_train.common.errors import UserError
from nmt_train.common.plural import counted
from nmt_train.config import Config
from nmt_train.modes.auto import with_mode
from nmt_train.modes.resolve import resolve
from nmt_train.modes.table import MODES
from nmt_train.report.figure import INK, label_ends, look, new_figure, save_figure
from nmt_train.simulation.adviser.words_needed import ONE, Choice, Needed, measured
from nmt_train.simulation.cluster import ClusterConfig
from nmt_train.simulation.timing import Shapes, measure
from nmt_train.training.setup import check_steps

_ALONE = "single"
_STEPS, _PERIODS, _MOST_STEPS = 24, 4, 600  # steps of every rank: a minimum, how many exchanges of local steps, and a limit
_ALIKE = 1.03  # modes whose speeds differ by less than this factor are about as fast
WORTH = 1.05  # the smallest gain for which further machines are recommended, as a factor


@dataclass(frozen=True)
class Row:
    """One choice on the first `machines` machines. needed: None if unknown, or measured with much more frequent exchanges.

    words_per_second: less the time for checkpoints and recovery copies. alone: words/s of one machine, divided by the words
    that its devices need. sent: bytes that each machine sends per step of its workers, on average. memory: bytes of the vectors
    of each device, without activations.
    """

    choice: Choice
    machines: int
    workers: int
    words_per_second: float
    sent: float
    memory: float
    needed: Needed | None
    alone: float = 0.0

    @property
    def speedup(self) -> tuple[float, float, float] | None:
        """How many times sooner than one machine it learns the same model: the best estimate, and its range."""
        if self.needed is None:
            return None
        pace = self.words_per_second / self.alone
        return pace / self.needed.words, pace / self.needed.high, pace / self.needed.low

    @property
    def estimate(self) -> float:
        """The best estimate of the speedup; 0: unknown."""
        return self.speedup[0] if self.speedup else 0.0

    @property
    def said(self) -> str:
        """The speedup for a reader."""
        best, low, high = self.speedup or (0.0, 0.0, 0.0)
        return f"{best:.2f} ({low:.2f} to {high:.2f})"


@dataclass(frozen=True)
class Comparison:
    """rows: the best first, then those whose words are not known. refused: by choice, why it cannot be used here.

    memory: bytes of each device; 0: not known.
    """

    rows: list[Row]
    refused: dict[str, str]
    memory: float = 0.0

    def best_on(self, machines: int) -> Row | None:
        """The row to recommend for this number of machines: of those about as fast as the best, the one with fewest words."""
        rows = [row for row in self._known if row.machines == machines]
        alike = [row for row in rows if row.estimate * _ALIKE >= rows[0].estimate]
        return min(alike, key=lambda row: row.needed.words if row.needed else math.inf, default=None)

    @property
    def _known(self) -> list[Row]:
        return [row for row in self.rows if row.speedup and not self._too_large(row)]

    @property
    def best(self) -> Row:
        """The row to use: of the fewest machines with which further machines do not pay. UserError if none fits in memory."""
        known = self._known
        if not known:
            least = min(row.memory for row in self.rows if row.speedup)
            raise UserError(
                f"memory: {self.memory / 1e9:.3g} GB of each device are not enough for any mode: without activations,"
                f" {least / 1e9:.3g} GB are needed; use a smaller model, or other devices"
            )
        fewest = min(row.machines for row in known if row.estimate * WORTH >= known[0].estimate)
        best = self.best_on(fewest)
        assert best is not None
        return best

    def _too_large(self, row: Row) -> bool:
        return 0 < self.memory < row.memory

    def advice(self) -> str:
        """One sentence or two."""
        best, machines = self.best, max(row.machines for row in self.rows)
        if machines == 1:
            return f"Use {best.choice.options}."
        if best.machines == 1:
            return f"Use one machine ({best.choice.options}): more do not pay here."
        words = f"Use {best.choice.options} on "
        words += f"all {machines} machines" if best.machines == machines else f"{best.machines} machines; more do not pay"
        words += f": {best.said} times one machine."
        sync = next((row for row in self._known if row.choice.mode == "sync" and row.machines == best.machines), None)
        if sync is not None and best.choice.mode != "sync":
            words += f" ({sync.choice.options} would be {sync.estimate:.1f} times one machine.)"
        return words

    def table(self) -> str:
        head = "machines  words/s   one machine: 1  words needed  speedup                    sent MB/step  GB/device"
        lines = [f"{head}  mode and settings"]
        for row in self.rows:
            needed = f"{row.needed.words:.2f}" if row.needed else "not known"
            lines.append(
                f"{row.machines:<10}{row.words_per_second:<10,.0f}{row.words_per_second / row.alone:<16.2f}{needed:<14}"
                f"{row.said if row.needed else '-':<27}{row.sent / 1e6:<14.2f}"
                f"{row.memory / 1e9:<11.2f}{row.choice.name}{' (not enough memory)' if self._too_large(row) else ''}"
            )
        lines += [f"not compared: {name}: {why}" for name, why in self.refused.items()]
        return "\n".join(lines) + "\n"

    def values(self) -> dict[str, Any]:
        """For JSON."""
        rows = [
            {
                "mode": row.choice.mode, "settings": dict(row.choice.settings), "machines": row.machines,
                "workers": row.workers, "words_per_second": row.words_per_second, "bytes_per_step": row.sent,
                "bytes_of_memory": row.memory, "speedup": row.speedup, "origin": row.choice.origin,
                "words_needed": dataclasses.asdict(row.needed) if row.needed else None,
            }
            for row in self.rows
        ]  # fmt: skip
        return {"advice": self.advice(), "best": self.rows.index(self.best), "rows": rows, "refused": self.refused}

    def write(self, folder: Path) -> None:
        """Write compare.json and compare.png."""
        (folder / "compare.json").write_text(json.dumps(self.values(), indent=1) + "\n", encoding="utf-8")
        best: dict[str, dict[int, float]] = {}  # by mode: the best estimate on each number of machines
        for row in self._known:  # sorted: the first is the best
            best.setdefault(row.choice.mode, {}).setdefault(row.machines, row.estimate)
        machines = sorted({row.machines for row in self.rows})
        top = self.best
        title = f"{top.choice.mode} on {counted(top.machines, 'machine')}: {top.estimate:.1f} times one machine (simulated)"
        if len(machines) == 1:
            figure, axes = new_figure(7, 1.2 + 0.25 * len(best), title)
            looks = [look(mode)["color"] for mode in best]
            axes.barh(list(best), [estimates[machines[0]] for estimates in best.values()], color=looks)
            axes.invert_yaxis()
            axes.axvline(1, color=INK, linewidth=0.8)
            axes.set_xlabel("speedup over one device")
        else:
            figure, axes = new_figure(7, max(4.0, 1.5 + 0.2 * len(best)), title)
            names = {}
            for mode, estimates in best.items():
                sizes = sorted(estimates)
                (line,) = axes.plot(sizes, [estimates[size] for size in sizes], marker="o", markersize=4, **look(mode))
                names[line] = mode
            axes.axhline(1, color=INK, linewidth=0.8)
            axes.set_xticks(machines)
            axes.set_ylim(bottom=0)
            axes.set_xlabel("machines")
            axes.set_ylabel("speedup over one machine")
            label_ends(axes, names)
        save_figure(figure, folder / "compare.png")


def choices() -> list[Choice]:
    """What is compared: all that was measured, and the other modes, of which only words/s are known."""
    found = measured()
    others = [Choice(mode, {}) for mode in MODES if mode not in {choice.mode for choice in found}]
    return [*found, *others]


def sizes(cluster: ClusterConfig) -> list[int]:
    """1, 2, 4, ... and all machines of a cluster."""
    return sorted({*(2**power for power in range(10) if 2**power < len(cluster.nodes)), len(cluster.nodes)})


def compare(
    config: Config, cluster: ClusterConfig, shapes: Shapes, tokens: Sequence[int], wanted: Sequence[tuple[Choice, int]],
    progress: Callable[[int, int, str], None] = lambda done, total, what: None, longest: float = math.inf,
) -> Comparison:  # fmt: skip
    """Simulate the timing of choices on parts of the cluster.

    wanted: each choice with a number of machines, the first of the cluster; one of them for one machine. tokens: target tokens
    of each batch. progress: called with the number of simulations done, their total, and the next one.
    longest: when this time is over [s], a choice is simulated only if there is none for this number of machines yet. If
    `longest` is given, choices that cannot be the best are left out, too. Raises UserError if no choice works on one machine.
    """
    start = time.perf_counter()
    if longest < math.inf:
        wanted = sorted(wanted, key=lambda pair: (pair[1], pair[0].needed.words if pair[0].needed else math.inf))
    rows: list[Row] = []
    refused: dict[str, str] = {}
    for number, (choice, machines) in enumerate(wanted):
        progress(number, len(wanted), f"{choice.mode} on {machines}")
        part = part_of(cluster, cluster.nodes[:machines])
        no_exchange = choice.mode == _ALONE
        if (no_exchange and machines > 1) or (not no_exchange and len(part.ranks()) == 1):
            continue
        late = time.perf_counter() - start > longest
        if (
            longest < math.inf
            and any(row.machines == machines for row in rows)
            and (late or not _may_be_best(choice, part, rows))
        ):
            continue
        try:
            rows.append(_row(config, choice, part, shapes, tokens))
        except UserError as error:
            refused[choice.name] = str(error)
    alone = _alone(rows)
    if not alone:
        raise UserError(f"no mode works on one machine: {'; '.join(refused.values())}")
    rows = [dataclasses.replace(row, alone=alone) for row in rows]
    return Comparison(sorted(rows, key=lambda row: (-row.estimate, -row.words_per_second)), refused, cluster.memory)


def _alone(rows: Sequence[Row]) -> float:
    """Words/s of one machine, divided by the words that its devices need; 0 if it was not simulated."""
    return max((row.words_per_second / row.needed.words for row in rows if row.machines == 1 and row.needed), default=0.0)


def _may_be_best(choice: Choice, cluster: ClusterConfig, rows: Sequence[Row]) -> bool:
    """Whether a choice could be better than all rows of this number of machines if its workers never waited."""
    workers, machines = len(cluster.ranks()), len(cluster.nodes)
    needed = choice.on(workers)
    if machines == 1 or needed is None:
        return needed is not None
    device = max(row.words_per_second / row.workers for row in rows if row.machines == 1)
    factors = dict.fromkeys(range(workers), 1.0) | {its.rank: its.factor for its in cluster.stragglers}
    first = max(factors[rank] for rank in range(cluster.nodes[0]))  # all rows of one machine are as slow as this device
    fastest = first / min(factors.values())
    speeds = [row.words_per_second / row.needed.words for row in rows if row.machines == machines and row.needed]
    return workers * fastest * device / needed.words > max(speeds, default=0.0)


def _row(config: Config, choice: Choice, cluster: ClusterConfig, shapes: Shapes, tokens: Sequence[int]) -> Row:
    """`alone` is not known yet."""
    config, ranks = with_mode(config, choice.mode, choice.settings), cluster.ranks()
    plan = resolve(config, ranks)
    check_steps(config, plan, lambda: tokens, len(ranks))
    period = max(plan.local.every or 1, plan.local.delay) if plan.local_steps else plan.accumulate
    steps = min(_MOST_STEPS, max(_STEPS, _PERIODS * period))
    timing = measure(config, cluster, shapes, tokens, steps)
    sent = sum(rank.sent for rank in timing.ranks) / len(cluster.nodes) / steps
    memory = max(rank.memory for rank in timing.ranks)
    needed = ONE if len(ranks) == 1 else choice.on(len(ranks)) if choice.exchanged_as_often(timing.period) else None
    words = timing.words_per_second * (1 - timing.upkeep)
    return Row(choice, len(cluster.nodes), len(ranks), words, sent, memory, needed)


def part_of(cluster: ClusterConfig, devices: Sequence[int]) -> ClusterConfig:
    """A part of a cluster, without failures. devices: how many devices of each machine are in it; 0: the machine is not."""
    firsts = [0, *accumulate(cluster.nodes)]
    ranks = [firsts[node] + place for node, count in enumerate(devices) for place in range(count)]
    nodes = [node for node, count in enumerate(devices) if count]
    stragglers = [dataclasses.replace(its, rank=ranks.index(its.rank)) for its in cluster.stragglers if its.rank in ranks]
    cards = [dataclasses.replace(its, node=nodes.index(its.node)) for its in cluster.cards if its.node in nodes]
    left = [devices[node] for node in nodes]
    return dataclasses.replace(cluster, nodes=left, stragglers=stragglers, cards=cards, crashes=[], kills=[], cuts=[])
