"""The tables by steps, in README.md and docs/choosing.md, name modes that `nmt-simulate --compare` finds best, or nearly."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from nmt_train import config as configuration
from nmt_train.model.transformer import Transformer
from nmt_train.modes.table import MODES
from nmt_train.simulation import cluster_file
from nmt_train.simulation.adviser.compare import Comparison, compare
from nmt_train.simulation.adviser.words_needed import Choice, measured
from nmt_train.simulation.timing import count

# Clusters that a reader may own. The others are those of papers, whose devices are slower than any of today; `league` charges
# a small model as a large one, and h200.yml and k40*.yml are devices.
OWNED = sorted(path for path in (ROOT / "configs" / "clusters").glob("*.yml") if path.stem.startswith(("gpu-", "h200-")))
NEARLY = 0.9  # of the speedup of the best mode
ALONE = Choice("single", {})
BASE = {  # what README.md compares: its own configuration, with another preset
    "corpus": {"train": ["train.en", "train.de"], "valid": ["valid.en", "valid.de"], "vocabulary": {"size": 8000}},
    "model": {"preset": "base"}, "batch": {"tokens": 4096}, "precision": "bf16", "stop": {"after": "20e"},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Line:
    """A row of a table: modes for `low` to `high` steps per all-reduce, on most devices and on an H200."""

    low: float
    high: float
    mode: str
    on_h200: str


def table(page: str) -> list[Line]:
    rows = re.search(r"(?m)^\| steps per all-reduce \|.*\n\|[-|]+\n((?:\|.*\n)+)", (ROOT / page).read_text(encoding="utf-8"))
    assert rows, page
    found: list[Line] = []
    for row in rows[1].splitlines():
        steps, modes = (cell.strip() for cell in row.split("|")[1:3])
        low = found[-1].high if found else 0.0
        high = math.inf if steps == "hundreds" else float(re.findall(r"[\d.]+", steps.split(";")[0])[-1])
        parts = [part.strip() for part in modes.split(";") if "on CPUs" not in part]  # there are no such cluster files
        named = {part.startswith("on an H200"): re.findall(r"`([\w-]+)`", part)[0] for part in parts}
        found.append(Line(low, high, named[False], named.get(True, named[False])))
    return found


def test_both_tables_say_the_same() -> None:
    lines = table("README.md")
    assert lines == table("docs/choosing.md")
    assert {mode for line in lines for mode in (line.mode, line.on_h200)} <= set(MODES)
    assert [line.high for line in lines] == sorted(line.high for line in lines)


def test_there_are_clusters_to_check() -> None:
    assert {path.stem for path in OWNED} >= {"gpu-4x1-1gbit", "gpu-4x1-10gbit", "h200-4x1-1gbit", "h200-4x1-10gbit"}


@pytest.mark.slow
@pytest.mark.parametrize("path", OWNED, ids=lambda path: path.stem)
def test_the_mode_for_the_steps_of_a_cluster_is_about_as_fast_as_the_best(path: Path) -> None:
    cluster, config = cluster_file.load(path), configuration.validate(BASE, {})
    tokens = config.batch.tokens
    with torch.device("meta"):
        shapes = [tuple(part.shape) for part in Transformer(config.model, config.corpus.vocabulary.size).parameters()]
    machines, batches = len(cluster.nodes), [tokens] * 400

    def compared(choices: Sequence[Choice], longest: float) -> Comparison:
        return compare(
            config, cluster, shapes, batches, [(ALONE, 1), *((choice, machines) for choice in choices)], longest=longest
        )

    everything = compared(measured(), longest=3600)  # leaves out what cannot be the best
    best = max(row.estimate for row in everything.rows)
    alone = next(row.words_per_second for row in everything.rows if row.machines == 1)
    steps = 3 * count(shapes) / cluster.network.bandwidth / (tokens / alone)  # as README.md says
    line = next(line for line in table("README.md") if steps < line.high)
    mode = line.on_h200 if path.stem.startswith("h200") else line.mode
    named = compared([choice for choice in measured() if choice.mode == mode], longest=math.inf)
    speedup = max((row.estimate for row in named.rows if row.machines == machines), default=0.0)
    assert speedup >= NEARLY * best, f"{steps:.1f} steps: {mode} has {speedup:.2f}, {everything.best.choice.name} {best:.2f}"
