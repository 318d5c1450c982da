"""The thesis's experiments (Neckermann 2017, chapter 4): which runs, on which clusters, and what they found."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from nmt_train.report.timeline import read_spans
from reproduce.claims import Clause, spread
from reproduce.runs import Setup, fitted
from reproduce.seeded import SEEDS, SeededRuns
from reproduce.thesis_settings import sending

WORDS, LATE = 1_500_000, 0.95  # of the runs of 1x1; the share after which their cross-entropy is the target
_CAP, _LONG_CAP = 1.12, 1.6  # longest time of a run, relative to 1x1; long: if it should take 1.5 times as long (T17)
SPARE = 0.01  # added to the cross-entropy at the end of a run, so that the line through its validations reaches it
STEPS = 400  # of every rank in a timing: with 40, words/s differed by up to 5% from those of training
NEAR = 0.1  # a ratio of times nearer to a limit than this is judged by three seeds
VISITS = 100  # of an element, in a run that takes as long as one of 1x1 (see thesis_settings.py)

SPARSE, SPARSE_OVERLAP = "thesis-sparse", "thesis-sparse-overlap"
BASE = Setup("single", "1x1")
BOUND = ("overlap.bound=2",)
# It counts its local steps as updates, so this warm-up takes as many words of all workers as that of other modes.
ONCE = Setup("simuparallel", "7x1", ("optimizer.warmup=57",))
REMOTE = ("server.bypass=none",)  # messages also to the worker's own shard, as in Figure 4.11
CENTRAL = ("server.shards=1",)  # one server for all, as in section 3.2
SLOW_CODEC = ("cluster.profile=k40-slow-codec.yml",)  # sparse codecs as slow as section 4.2.4 says; words/s only
# As in the thesis: no rules for asynchronous workers, no local updates, one machine after the other, 8 bytes per element.
_DENSE = (
    "optimizer.async_beta1=unchanged", "optimizer.async_warmup=unchanged", "overlap.local_update=none",
    "server.one_node_at_a_time=true",
)  # fmt: skip
_ELEMENTS = ("dropping.values=fp32", "dropping.indices=int32")
ALWAYS: dict[str, tuple[str, ...]] = {
    "single": _DENSE, "vanilla": _DENSE, "overlap": _DENSE, SPARSE: _ELEMENTS, SPARSE_OVERLAP: _ELEMENTS,
}  # fmt: skip
# Training runs are shorter than the thesis's; they send more, and pay for 0.1%. Timings send 0.1%.
IN_TRAINING: dict[str, tuple[str, ...]] = {SPARSE: sending(VISITS), SPARSE_OVERLAP: sending(VISITS)}


_SCALING = ("4x1", "4x2", "4x3", "4x4", "2x2", "3x2", "5x2")  # over devices, and over machines


def timed() -> list[Setup]:
    """The setups whose words/s are simulated, without training."""
    found = [Setup("single", f"1x{n}") for n in (1, 2, 3, 4, 8)]
    for mode in ("vanilla", "overlap", SPARSE, SPARSE_OVERLAP):
        found += [Setup(mode, name) for name in ("2x1", *_SCALING)]
    found += [Setup("vanilla", name, options) for name in ("2x1", "4x1", "7x1") for options in (REMOTE, CENTRAL)]
    found += [Setup(mode, name, SLOW_CODEC) for mode in (SPARSE, SPARSE_OVERLAP) for name in _SCALING]
    return [*found, Setup("overlap", "3x1"), Setup(SPARSE, "2x1", REMOTE)]


def trained() -> list[Setup]:
    """The setups that are trained besides 1x1, most important first."""
    found = [Setup(SPARSE, name) for name in ("4x1", "2x1", "3x1")]
    found += [Setup(SPARSE_OVERLAP, name) for name in ("7x1", "3x1", "4x2", "4x1")]
    found += [Setup("single", name) for name in ("1x4", "1x2", "1x8")]
    found += [Setup(SPARSE, name) for name in ("2x2", "3x2", "4x2")]
    found += [Setup(SPARSE_OVERLAP, "3x2")]
    found += [Setup("vanilla", name) for name in ("2x1", "2x2", "4x1", "4x2")]
    found += [Setup("overlap", name) for name in ("2x1", "2x2", "4x1")]
    found += [Setup("overlap", name, BOUND) for name in ("2x2", "2x1")]
    return [*found, ONCE]


def longest(setup: Setup) -> float:
    """The longest time of a training run, relative to 1x1."""
    return _LONG_CAP if setup.mode == "overlap" and BOUND[0] not in setup.options else _CAP


@dataclass(frozen=True)
class Ratio:
    """How many times sooner `quick` reaches the target than `slow`, for each seed with which both were trained.

    If one of the two has not reached the target, the ratio is that of the times to the lowest cross-entropy that both reach.
    """

    slow: Setup
    quick: Setup
    values: tuple[float, ...]

    def __str__(self) -> str:
        return spread(self.values, "x")


class Results(SeededRuns):
    """What the thesis compares: words/s of a node, what threads do, and times to a target."""

    def measures(self, timing: Path) -> Iterator[tuple[str, float]]:
        """Also how long an exchange with one shard takes, of the same machine and of another, if there is a trace."""
        yield from super().measures(timing)
        if (timing.parent / "trace").exists():
            for where, seconds in exchanges(read_spans(timing.parent)).items():
                yield f"seconds of an exchange with {where}", mean(seconds)

    def share(self, setup: Setup, *spans: str) -> float:
        """Of the time of a rank that takes these spans, each `thread: name`, as the mean over ranks."""
        return sum(self.measure(setup, f"timing share of {its}") for its in spans)

    def per_node(self, mode: str, cluster: str) -> float:
        return self.speed(Setup(mode, cluster)) / int(cluster.split("x")[0])

    def target(self) -> float:
        """The cross-entropy of 1x1 after 95% of its words, as the mean over its seeds. Raises Missing without them."""
        return mean(fitted(self.curve(BASE.with_seed(seed)), LATE * WORDS) for seed in SEEDS)

    def ratio(self, slow: Setup, quick: Setup) -> Ratio:
        values = self.by_seed(lambda seed: self._ratio(slow.with_seed(seed), quick.with_seed(seed)))
        return Ratio(slow, quick, tuple(values))

    def _ratio(self, slow: Setup, quick: Setup) -> float:
        times = [self.time_to(its, self.target()) for its in (slow, quick)]
        if not all(map(math.isfinite, times)):
            lowest = SPARE + max(fitted(self.curve(its), self.curve(its)[-1]["words"]) for its in (slow, quick))
            times = [self.time_to(its, lowest) for its in (slow, quick)]
        return times[0] / times[1]

    def later(self, setup: Setup, than: Setup) -> list[float]:
        """By seed: cross-entropy of `setup` when `than` ends, relative to that of `than`, which may be validated only then."""

        def relative(seed: int) -> float:
            its, other = setup.with_seed(seed), self.curve(than.with_seed(seed))
            return self.after(its, other[-1]["seconds"], "seconds") / float(other[-1]["cross-entropy"])

        return self.by_seed(relative)

    def faster(self, mode: str, cluster: str, *options: str, than: Setup = BASE) -> Ratio:
        return self.ratio(than, Setup(mode, cluster, options))

    def clause(self, says: str, ratio: Ratio, low: float = -math.inf, high: float = math.inf) -> Clause:
        return self.decide(says, (ratio.slow, ratio.quick), ratio.values, NEAR, low, high)

    def behind(self, setups: Sequence[Setup]) -> dict[Setup, float]:
        """Cross-entropy after as many words as 1x1 had, relative to 1x1; without setups that were not trained as long."""
        known = [its for its in setups if self.trained(its) and self.curve(its)[-1]["words"] >= 0.99 * WORDS]
        if not known:
            return {}
        base = mean(fitted(self.curve(BASE.with_seed(seed)), WORDS) for seed in SEEDS)
        return {its: self.after(its, WORDS) / base - 1 for its in known}


class SlowCodec(Results):
    """The same results, but words/s of sparse modes with the slower codecs."""

    def measure(self, setup: Setup, name: str) -> float:
        slow = setup.mode in (SPARSE, SPARSE_OVERLAP) and setup.cluster in _SCALING and name.startswith("timing")
        return super().measure(replace(setup, options=SLOW_CODEC) if slow else setup, name)


def exchanges(spans: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Seconds of each exchange with one shard (encode, wait, decode), of a worker that exchanges with one after the other."""
    found: dict[str, list[float]] = {}
    for rank in {span["rank"] for span in spans}:
        its = [span for span in spans if span["rank"] == rank]
        sent = {span["start"]: span["end"] - span["start"] for span in its if span["name"] == "send gradients"}
        ours = [span for span in its if span["thread"] == "MainThread" and span["name"] in ("encode", "waiting", "decode")]
        ours.sort(key=lambda span: span["start"])
        for encode, waiting, decode in zip(ours, ours[1:], ours[2:], strict=False):
            if encode["name"] == "encode" and waiting["start"] in sent:  # what needs no network is sent in no time
                where = "another machine" if sent[waiting["start"]] else "the same machine"
                found.setdefault(where, []).append(decode["end"] - encode["start"])
    return found
