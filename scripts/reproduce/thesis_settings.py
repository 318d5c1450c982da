"""Which settings the thesis's sparse algorithm needs: a planned experiment (docs/archive/thesis-settings.md).

An element of a gradient is sent once in 1/density pushes, so what counts is the number of *visits*: the updates of a device,
times the share of the elements that it sends. The thesis has about 100. Short runs have as many if they send more, and are
charged on the clock for 0.1% of the elements, as the thesis's were.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean

from reproduce.runs import Missing, Runs, Setup

WORDS, SEED, DENSITY = 1_500_000, 0, 0.001
# Share of the elements that is sent, named by the visits of a run that takes as long as 1x1 needs for `WORDS` (1,600 updates
# per device). The runs here have `WORDS` of all devices, so a quarter of these visits on 4x1, and an eighth on 4x2.
SENT = {2: 0.001, 20: 0.0125, 100: 0.0625}
CLUSTERS, BEST = ("4x1", "4x2"), 3  # of the settings on 4x1, the best ones for each number of visits are also tried on 4x2


@dataclass(frozen=True)
class Settings:
    """Of the optimizer."""

    beta2: float
    schedule: str
    rate: float

    @property
    def options(self) -> tuple[str, ...]:
        return (
            f"optimizer.beta2={self.beta2}", f"optimizer.schedule={self.schedule}", f"optimizer.learning_rate={self.rate}",
            "model.label_smoothing=0",
        )  # fmt: skip


TRIED = tuple(Settings(*its) for its in itertools.product((0.98, 0.999), ("constant", "inverse-sqrt"), (0.001, 0.003)))


def one_device(settings: Settings) -> Setup:
    return Setup("single", "1x1", settings.options).with_seed(SEED)


def sparse(cluster: str, visits: int, settings: Settings) -> Setup:
    return Setup("thesis-sparse", cluster, (*sending(visits), *settings.options)).with_seed(SEED)


def sending(visits: int) -> tuple[str, ...]:
    """Options with which an element is sent this often, and charged as in the thesis."""
    dropped = f"{1 - SENT[visits]:.4g}"
    return (
        f"dropping.up={dropped}", f"dropping.down={dropped}",
        f"cluster.scale.network_bytes={DENSITY / SENT[visits]:.3g}",
    )  # fmt: skip


def first() -> list[Setup]:
    """The runs whose settings do not depend on results, those with the most visits first."""
    return [
        *(sparse(CLUSTERS[0], visits, settings) for visits in sorted(SENT, reverse=True) for settings in TRIED),
        *map(one_device, TRIED),
    ]


def second(found: Runs) -> list[Setup]:
    """The runs on the larger cluster. Raises Missing without those of `first`."""
    return [sparse(CLUSTERS[1], visits, its) for visits in SENT for its in _ranked(found, visits, CLUSTERS[:1])[:BEST]]


def chosen(found: Runs, visits: int) -> Settings:
    """The settings with the lowest cross-entropy at the end, as the mean over both clusters. Raises Missing without runs."""
    return _ranked(found, visits, CLUSTERS)[0]


def _ranked(found: Runs, visits: int, clusters: tuple[str, ...]) -> list[Settings]:
    """Best first. Of several clusters, those settings that were tried on all."""
    tried = _ranked(found, visits, CLUSTERS[:1])[:BEST] if clusters == CLUSTERS else TRIED

    def end(settings: Settings) -> float:
        return mean(found.after(sparse(cluster, visits, settings), WORDS) for cluster in clusters)

    return sorted(tried, key=end)


def table(found: Runs) -> Iterator[str]:
    """Markdown: cross-entropy of every run at its end, and the virtual time that it took."""
    yield "| visits | beta2 | schedule | rate | 4x1 | 4x2 |\n|---|---|---|---|---|---|"
    rows = [(str(visits), its, [sparse(cluster, visits, its) for cluster in CLUSTERS]) for visits in SENT for its in TRIED]
    rows += [("one device", its, [one_device(its)]) for its in TRIED]
    for of, its, setups in rows:
        cells = " | ".join(_end(found, setup) for setup in setups)
        yield f"| {of} | {its.beta2} | {its.schedule} | {its.rate} | {cells} |"


def _end(found: Runs, setup: Setup) -> str:
    try:
        return f"{found.after(setup, WORDS):.3f} ({found.curve(setup)[-1]['seconds']:,.0f} s)"
    except Missing:
        return "-"
