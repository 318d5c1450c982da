"""What the judges of the papers' claims share: comparisons of runs, and lists of numbers.

A single number is confirmed within 10%, a range as it stands, and a quality is "the same" within 2% of the cross-entropy.
Cross-entropies whose ratio differs from a limit by less than 3% are those of three seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from statistics import mean

from reproduce.claims import Clause, spread
from reproduce.papers import WORDS
from reproduce.runs import Runs, Setup
from reproduce.seeded import SeededRuns

SAME = 1.02  # the largest ratio of two cross-entropies of the same quality
NEAR, NEAR_TIMES = 0.03, 0.1  # ratios of cross-entropies, and of times, nearer to a limit are judged by three seeds


def of_seeds(found: SeededRuns, setup: Setup, value: Callable[[Setup], float]) -> list[float]:
    """A value of a setup, by the seeds with which it was trained."""
    return found.by_seed(lambda seed: value(setup.with_seed(seed)))


def after_words(found: SeededRuns, setup: Setup) -> float:
    """Cross-entropy after equal words: the mean over the seeds with which it was trained."""
    return mean(of_seeds(found, setup, partial(found.after, place=WORDS)))


def learned(found: SeededRuns, setup: Setup) -> str:
    """The same as text, with the range of the seeds if there are several."""
    return spread(of_seeds(found, setup, partial(found.after, place=WORDS)), decimals=3)


def compared(
    found: SeededRuns, says: str, setup: Setup, other: Setup, low: float = -math.inf, high: float = math.inf,
    near: float = NEAR,
) -> Clause:  # fmt: skip
    """Whether the cross-entropy of `setup` after equal words, relative to that of `other`, lies in a range (see `decide`)."""

    def ratio(seed: int) -> float:
        return found.after(setup.with_seed(seed), WORDS) / found.after(other.with_seed(seed), WORDS)

    return found.decide(says, (setup, other), found.by_seed(ratio), near, low, high)


def pace(found: Runs, setup: Setup) -> float:
    """Words per second of a worker."""
    return found.speed(setup) / found.measure(setup, "timing workers")


def speed(found: Runs, setup: Setup) -> float:
    """Words per second of a whole training run."""
    end = found.curve(setup)[-1]
    return float(end["words"] / end["seconds"])


def named(found: SeededRuns, setups: Mapping[str, Setup]) -> str:
    """The cross-entropies after equal words of some setups, each after its name."""
    return ", ".join(f"{name} {learned(found, setup)}" for name, setup in setups.items())
