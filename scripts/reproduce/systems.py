"""The systems that scripts/tune compares on four machines, and the settings that it tries for each."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass

ALONE, IDEAL = "one machine", "ideal sync"


@dataclass(frozen=True)
class System:
    """A mode with fixed options, and the settings to try; the first value of each is part of the first trial.

    unlimited: `fixed` gives the network.
    """

    mode: str
    fixed: tuple[str, ...]
    knobs: Mapping[str, tuple[str, ...]]
    unlimited: bool = False

    def candidates(self, most: int) -> list[tuple[str, ...]]:
        """The settings of at most `most` trials: the first values of all knobs, then random choices, the same every time."""
        choices = list(itertools.product(*([f"{key}={value}" for value in values] for key, values in self.knobs.items())))
        rest = choices[1:]
        random.Random(1).shuffle(rest)
        return [choices[0], *rest[: most - 1]]


def _knobs(rate: str, warmup: str, beta1: str = "0.9 0.8", **more: str) -> dict[str, tuple[str, ...]]:
    """Values to try, separated by spaces; further keys are written with __ for a dot."""
    values = {"rate": rate, "warmup": warmup, "beta1": beta1, "floor": "1 0.3 0"} | {
        key.replace("__", "."): text for key, text in more.items()
    }
    return {key: tuple(text.split()) for key, text in values.items()}


# Systems that make fewer updates from the same words are offered higher rates and warm-ups of fewer updates.
_ONE_BATCH, _FOUR_BATCHES = ("0.003 0.002 0.005 0.008", "400 100 200 800"), ("0.006 0.003 0.009 0.012", "100 25 50 200")
_LOCAL = ("0.003 0.002 0.005 0.008", "100 25 50 200")
_PUSHES = ("0.003 0.002 0.005", "800 400 1600", "0.15 0 0.5")
_LOCAL_PUSHES = ("0.002 0.001 0.003", "200 100 400", "0.9 0.5 0.15")
_UNLIMITED = ("cluster.network.bandwidth=100 GB/s", "cluster.network.latency=0 us")
SYSTEMS: dict[str, System] = {
    ALONE: System("single", ("cluster.nodes=1 x 1",), _knobs(*_ONE_BATCH)),
    IDEAL: System("sync", _UNLIMITED, _knobs(*_FOUR_BATCHES), unlimited=True),
    "sync bf16": System("sync", ("override.up=bf16",), _knobs(*_FOUR_BATCHES, batch__accumulate="1 2 4")),
    "powersgd": System("powersgd", (), _knobs(*_FOUR_BATCHES, low_rank__rank="4 1 16 32", low_rank__dense_updates="0 100")),
    "local-sgd": System("local-sgd", (), _knobs(*_LOCAL, local__every="8 4 16 32", local__delay="0 4")),
    "diloco": System("diloco", (), _knobs(*_LOCAL, local__every="16 8 32", local__outer_momentum="0 0.5 0.9",
                                          local__outer_rate="1.0 0.7")),
    "strom": System("strom", (), _knobs(*_PUSHES)),
    "sparse": System("sparse", (), _knobs(*_PUSHES)),
    "sparse-overlap": System("sparse-overlap", (), _knobs(*_PUSHES)),
    "sparse-local": System(
        "sparse-local", (), _knobs(*_LOCAL, local__every="15 8 30", local__delay="0 4 8", tiles__keep="64 128",
                                      tiles__decay="0.95 1")
    ),
    "sparse-local-async": System(
        "sparse-local-async", (), _knobs(*_LOCAL_PUSHES, local__every="1 4 8", dropping__up="0.99 0.97")
    ),
    "sparse, local steps": System(
        "sparse", ("override.schedule=local-steps",), _knobs(*_LOCAL, local__every="4 8", dropping__up="0.99 0.97")
    ),
}  # fmt: skip
