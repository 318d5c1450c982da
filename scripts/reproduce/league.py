"""Every mode on four machines at three network bandwidths, as a table and a figure that show when to use which mode."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import Any

from nmt_train.common.errors import UserError
from nmt_train.report.figure import mark, new_figure, save_figure
from reproduce.papers import as_together, together
from reproduce.runs import Missing, Runs, Setup

RATES = {"100 Mbit/s": 0.1, "1 Gbit/s": 1.0, "10 Gbit/s": 10.0}
SEEDS = (1, 2)
TRAINED_AT = "1 Gbit/s"
STEPS = 205  # steps of every rank in a timing: 5 are not counted, and local-sgd exchanges every 100 steps
BASELINE, ALONE = "sync, bf16, 4 batches an update", "one machine alone"
TEST = "tested.json"  # in a run's folder: the scores of nmt-validate
# An update from the batches of n workers has n times the words. Its warm-up therefore has 1/n of the updates, and its learning
# rate is sqrt(n) times as high. With local steps, each worker makes 1/n of the updates, so its warm-up is also divided by n.
# The rates of _FOUR and _SIXTEEN are the best of 0.003, 0.006 and 0.012, and of 0.003, 0.008 and 0.012, after a million words.
_FOUR, _SIXTEEN = together(4), ("optimizer.warmup=25", "optimizer.learning_rate=0.008")
_SHARE = ("optimizer.warmup=100",)
# In the order of the table: synchronous modes, modes with local steps, asynchronous modes.
ROWS: dict[str, Setup] = {
    ALONE: Setup("single", "league", ("cluster.nodes=1 x 1",)),
    BASELINE: Setup("sync", "league", ("override.up=bf16", "batch.accumulate=4", *_SIXTEEN)),
    "sync": Setup("sync", "league", _FOUR),
    "powersgd": Setup("powersgd", "league", _FOUR),
    "pipe": Setup("pipe", "league", _FOUR),
    "backup": Setup("backup", "league", _FOUR),
    "local-sgd": Setup("local-sgd", "league", _SHARE),
    "diloco": Setup("diloco", "league", _SHARE),
    "simuparallel": Setup("simuparallel", "league", _SHARE),
    "easgd": Setup("easgd", "league", _SHARE),
    "downpour": Setup("downpour", "league", ("optimizer.learning_rate=0.02", "optimizer.schedule=constant")),
    "softsync": Setup("softsync", "league", together(2)),
    "staleness-aware": Setup("staleness-aware", "league", (as_together(4),)),
    "vanilla": Setup("vanilla", "league"),
    "overlap": Setup("overlap", "league"),
    "strom": Setup("strom", "league"),
    "sparse": Setup("sparse", "league"),
    "sparse-overlap": Setup("sparse-overlap", "league"),
}
# These modes compute the same parameters on every network: they are trained at one bandwidth, and timed at all three.
IN_STEP = (BASELINE, "sync", "powersgd", "pipe", "local-sgd", "diloco")
DRAWN = (BASELINE, "sync", "powersgd", "pipe", "local-sgd", "diloco", "vanilla", "overlap", "strom", "sparse", "sparse-overlap")
_DENSE = (BASELINE, "sync", "pipe", "vanilla", "overlap")


def setup(row: str, rate: str, seed: int) -> Setup:
    """The setup of a row of the table at a bandwidth."""
    base = ROWS[row]
    network = () if row == ALONE else (f"cluster.network.bandwidth={rate}",)
    return Setup(base.mode, base.cluster, (*network, f"seed={seed}", *base.options))


TIMED = tuple(setup(row, rate, SEEDS[0]) for rate in RATES for row in IN_STEP)


def setups(seed: int) -> list[Setup]:
    """All training runs of a seed, starting with the bandwidth at which every row is trained."""
    rates = sorted(RATES, key=lambda rate: rate != TRAINED_AT)
    return list(dict.fromkeys(_trained(row, rate, seed) for rate in rates for row in ROWS))


def _trained(row: str, rate: str, seed: int) -> Setup:
    return setup(row, TRAINED_AT if row in IN_STEP else rate, seed)


def target(found: Runs) -> float:
    """The final cross-entropy of the baseline (the worst over seeds)."""
    return max(found.validations(each)[-1]["cross-entropy"] for each in _runs(found, BASELINE, TRAINED_AT))


def seconds(found: Runs, row: str, rate: str, goal: float) -> float:
    """Mean seconds to a cross-entropy over seeds with known times; infinite if one does not reach it, nan without any."""
    times = list(_times(found, row, rate, goal))
    return _slower(found, row, rate) * mean(times) if times else math.nan


def _times(found: Runs, row: str, rate: str, goal: float) -> Iterator[float]:
    """Seconds to a cross-entropy, for each seed with a known time."""
    for each in _runs(found, row, rate):
        with suppress(Missing):
            yield found.time_to(each, goal)


def _slower(found: Runs, row: str, rate: str) -> float:
    """The factor by which a run takes longer at this bandwidth than at the one where it was trained."""
    if row not in IN_STEP:
        return 1.0
    at, its = (float(found.timing(setup(row, each, SEEDS[0]))["words_per_second"]) for each in (TRAINED_AT, rate))
    return at / its


def table(found: Runs) -> list[str]:
    """Lines of Markdown: one table per bandwidth; rows whose runs are not finished are left out."""
    lines: list[str] = []
    goal = target(found)
    for rate in RATES:
        lines += [f"### {rate}", "", *_HEAD]
        lines += [_line(found, row, rate, goal) for row in ROWS if _runs(found, row, rate)]
        lines.append("")
    return lines


_HEAD = (
    "| mode | minutes to the target | speedup over one machine | cross-entropy | BLEU | sent (sync: 1) |",
    "|---|---|---|---|---|---|",
)


def _line(found: Runs, row: str, rate: str, goal: float) -> str:
    runs = _runs(found, row, rate)
    its, alone = seconds(found, row, rate, goal), seconds(found, ALONE, rate, goal)
    last = " ".join(f"{found.validations(each)[-1]['cross-entropy']:.3f}" for each in runs)
    bleu = " ".join(f"{_tested(found, each)['bleu']:.1f}" for each in runs)
    faster = f"{its / 60:,.1f} | {alone / its:.2f}" if math.isfinite(its) else "never |" if its == math.inf else "not known |"
    if (known := len(list(_times(found, row, rate, goal)))) < len(runs) and known:
        faster = faster.replace(" |", f" ({known} of {len(runs)} seeds) |")
    return f"| {row} | {faster} | {last} | {bleu} | {_sent(found, row, rate)} |"


def _runs(found: Runs, row: str, rate: str) -> list[Setup]:
    """The finished runs of a row, over all seeds."""
    return [each for seed in SEEDS if _finished(found, each := _trained(row, rate, seed))]


def _finished(found: Runs, its: Setup) -> bool:
    try:
        return (found.run(its) / TEST).exists()
    except UserError:
        return False


def _tested(found: Runs, its: Setup) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((found.run(its) / TEST).read_text(encoding="utf-8"))
    return values


def _sent(found: Runs, row: str, rate: str) -> str:
    """Bytes per word, relative to sync; a dash if there were too few updates for a log line."""
    try:
        (_, size, words), (_, of_sync, its_words) = (found.sent(_trained(each, rate, SEEDS[0])) for each in (row, "sync"))
    except Missing:
        return "not known"
    return f"{size / words / (of_sync / its_words):.3f}" if words else "-"


def draw(found: Runs, output: Path) -> Path:
    """Speedup of each mode over one machine, by network bandwidth, for modes that reach the target."""
    figure, axes = new_figure(width=8, height=4.8)
    goal = target(found)
    for row in DRAWN:
        times = {speed: seconds(found, row, rate, goal) for rate, speed in RATES.items() if _runs(found, row, rate)}
        alone = seconds(found, ALONE, TRAINED_AT, goal)
        places = [(speed, alone / its) for speed, its in times.items() if math.isfinite(its)]
        if places:
            axes.plot(*zip(*places, strict=True), "--" if row in _DENSE else "-", marker="o", label=row)
    axes.axhline(1, color="black", linewidth=0.8)
    mark(axes, list(RATES.values()))
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("network (Gbit/s)")
    axes.set_ylabel("times as fast as one machine")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), title="dashed: dense gradients")
    save_figure(figure, output)
    return output
