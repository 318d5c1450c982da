"""The claims of four papers, P1 to A2, judged by simulated runs on clusters like theirs.

Limits were set before the runs: a number is confirmed within 10%, a quality is "the same" within 2% of the cross-entropy.
Cross-entropies that differ from a limit, or from each other, by less than 3% are those of three seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import mean

from nmt_train.simulation import equations
from reproduce import papers
from reproduce.claims import Claim, Clause, exact
from reproduce.papers import BATCHES, BUNDLES, CODECS, SPEEDS, TAUS, WIDTHS, WORDS, WORKERS
from reproduce.runs import Runs, Setup, fitted
from reproduce.seeded import SeededRuns

_SAME = 1.02  # the largest ratio of two cross-entropies of the same quality
_NEAR, _NEAR_TIMES = 0.03, 0.1  # ratios of cross-entropies, and of times, nearer to a limit are judged by three seeds
_SPARE = 0.01  # added to the highest cross-entropy at the end of runs, so that the lines of all of them reach it
Judged = tuple[str, Sequence[Clause]]


def after_words(found: SeededRuns, setup: Setup) -> float:
    """Cross-entropy after equal words: the mean over the seeds with which it was trained."""
    return mean(found.by_seed(lambda seed: found.after(setup.with_seed(seed), WORDS)))


def _compared(
    found: SeededRuns, says: str, setup: Setup, other: Setup, low: float = -math.inf, high: float = math.inf
) -> Clause:
    """Whether the cross-entropy of `setup` after equal words, relative to that of `other`, lies in a range."""

    def ratio(seed: int) -> float:
        return found.after(setup.with_seed(seed), WORDS) / found.after(other.with_seed(seed), WORDS)

    return found.decide(says, (setup, other), exact(found.by_seed(ratio)), _NEAR, low, high)


def pace(found: Runs, setup: Setup) -> float:
    """Words per second of a worker."""
    return found.speed(setup) / found.measure(setup, "timing workers")


def speedups(found: Runs) -> dict[str, list[float]]:
    """Speedup of pipe with its faster codec over sync and over a synchronous server, at each of BATCHES."""
    best = [max(pace(found, papers.pipe(seconds, codec)) for codec in CODECS) for seconds in BATCHES]
    others = {"sync": papers.all_reduce, "a synchronous server": papers.by_server}
    return {
        name: [quick / pace(found, setup(seconds)) for seconds, quick in zip(BATCHES, best, strict=True)]
        for name, setup in others.items()
    }


def _p1(found: Runs) -> Judged:
    ratios = speedups(found)
    rows = [f"{_list(values, 1)} times as fast as {name}" for name, values in ratios.items()]
    both = any(2.0 <= sync <= 3.2 and 4.0 <= server <= 5.4 for sync, server in zip(*ratios.values(), strict=True))
    text = f"with batches of {', '.join(f'{seconds:g}' for seconds in BATCHES)} s: {'; '.join(rows)}"
    return text, [
        Clause("faster", min(min(values) for values in ratios.values()) > 1), Clause("both ranges with the same batch", both),
    ]  # fmt: skip


def efficiencies(found: Runs, codec: str) -> list[float]:
    """Speed of a worker in a pipeline of four, relative to the same worker alone, at each of BATCHES (Eq. 7)."""
    return [pace(found, papers.pipe(seconds, codec)) / pace(found, papers.alone(seconds)) for seconds in BATCHES]


def _p2(found: Runs) -> Judged:
    """Relative to the duration of an exchange that Eq. 5 predicts from the cluster file, without any simulation."""
    errors, bound = [], []
    for codec in CODECS:
        for seconds, efficiency in zip(BATCHES, efficiencies(found, codec), strict=True):
            its = papers.predicted(codec)
            predicted = equations.scaling_efficiency(its.l_up, seconds, its.l_comm)
            errors.append(abs(efficiency / predicted - 1))
            if predicted == 1:
                bound.append(efficiency)
    text = f"scaling efficiency within {max(errors):.1%} of Eq. 5 and 7; where computation is longer: {_list(bound, 2)}"
    return text, [
        Clause("as in Eq. 5 and 7, within 10%", max(errors) < 0.1), Clause("efficiency 1, within 5%", min(bound) > 0.95),
    ]  # fmt: skip


def _p3(found: SeededRuns) -> Judged:
    learned = ", ".join(f"{after_words(found, papers.of_width(width)):.3f} ({width})" for width in WIDTHS)
    two, *more = (pace(found, papers.timed_width(width)) for width in WIDTHS)
    text = f"cross-entropy after equal words by width: {learned}; words/s relative to width 2: "
    clauses = [Clause("no faster", max(more) / two < _SAME)]
    clauses += [
        _compared(found, f"width {width} learns less", papers.of_width(width), papers.of_width(2), low=1.0)
        for width in WIDTHS[1:]
    ]
    return text + _list([its / two for its in more], 2), clauses


def _p4_bytes(found: Runs) -> Judged:
    dense = _sent(found, papers.all_reduce(BATCHES[2]))
    shares = {codec: _sent(found, papers.pipe(BATCHES[2], codec)) / dense for codec in CODECS}
    clauses = [Clause(codec, abs(shares[codec] - share) < 0.01) for codec, share in (("truncated", 0.5), ("int8", 0.25))]
    return f"share of the bytes of sync: {_named(shares)}", clauses


def _p4_quality(found: SeededRuns) -> Judged:
    after = {name: after_words(found, setup) for name, setup in {"sync": papers.SYNC, **papers.WARMED}.items()}
    clauses = [_compared(found, codec, papers.WARMED[codec], papers.SYNC, high=_SAME) for codec in CODECS]
    return f"cross-entropy after equal words: {_named(after)}", clauses


def relative_speeds(found: Runs) -> dict[int, float]:
    """Words per second of all workers relative to one worker, by number of nodes."""
    one = pace(found, papers.strom_nodes(1))
    return {nodes: nodes * pace(found, papers.strom_nodes(nodes)) / one for nodes in SPEEDS}


def _s1_speed(found: Runs) -> Judged:
    speeds = relative_speeds(found)
    shown = ", ".join(f"{speed:.1f} ({nodes})" for nodes, speed in speeds.items() if nodes > 1)
    clauses = [Clause(f"{nodes} nodes", abs(speeds[nodes] / its - 1) < 0.1) for nodes, its in SPEEDS.items() if nodes > 1]
    return shown, clauses


def _s1_quality(found: SeededRuns) -> Judged:
    alone, many = (after_words(found, setup) for setup in (papers.STROM_ALONE, papers.strom_coding("words")))
    text = f"cross-entropy after equal words {many:.3f} (five workers), {alone:.3f} alone"
    others = {name: after_words(found, setup) for name, setup in papers.STROM_VARIANTS.items()}
    text += f"; five workers with {_named(others)}"
    return text, [_compared(found, "no loss", papers.strom_coding("words"), papers.STROM_ALONE, high=_SAME)]


def compressions(found: SeededRuns) -> dict[float, tuple[float, float]]:
    """By threshold: the compression ratio (gradient size / message size), and cross-entropy after equal words."""
    return {tau: _compression(found, papers.strom_tau(tau)) for tau in TAUS}


def _compression(found: SeededRuns, setup: Setup) -> tuple[float, float]:
    full = 4 * found.measure(papers.STROM_ALONE, "timing elements")
    return full / found.measure(setup, "bytes/message"), after_words(found, setup)


def _s2(found: SeededRuns) -> Judged:
    """Quality is compared with one node alone, as in the paper's table."""
    found_by = compressions(found)
    times = [its for its, _ in found_by.values()]
    as_good = [_compared(found, f"tau {tau:g}", papers.strom_tau(tau), papers.STROM_ALONE, high=_SAME).holds for tau in TAUS]
    fine, maybe = (
        [its for its, good in zip(times, as_good, strict=True) if good in kinds] for kinds in ((True,), (True, None))
    )
    wide, perhaps = (bool(its) and max(its) > 4 * min(its) for its in (fine, maybe))
    falls = _compared(found, "then falls", papers.strom_tau(TAUS[-1]), papers.STROM_ALONE, low=_SAME)
    shown = {f"{tau:g}": pair for tau, pair in found_by.items()}
    shown["adapted to 1/846 of the elements"] = _compression(found, papers.strom_coding("words"))
    text = "; ".join(f"{name}: {its:,.0f}, {value:.3f}" for name, (its, value) in shown.items())
    clauses = [
        Clause("278 to 12,978 times smaller", min(times) <= 278 and max(times) >= 12_978),
        Clause("holds over a wide range (four times)", wide if wide == perhaps else None), falls,
    ]  # fmt: skip
    alone = after_words(found, papers.STROM_ALONE)
    return (
        f"gradient size / message size, and cross-entropy after equal words, by tau: {text}; one node alone: {alone:.3f}",
        clauses,
    )


def _s3(found: Runs) -> Judged:
    rice, words = (found.measure(papers.strom_coding(coding), "bytes/message") for coding in ("golomb-rice", "words"))
    bits = 32 * rice / words
    return f"{bits:.1f} bits, including the sign", [Clause("10 to 11 bits", 10 <= bits <= 11)]


def _f1(found: SeededRuns) -> Judged:
    curves = [found.curve(papers.downpour(workers)) for workers in WORKERS]
    target = _SPARE + max(fitted(curve, curve[-1]["words"]) for curve in curves)  # all reach it
    times = ", ".join(f"{found.time_to(papers.downpour(workers), target):,.0f} s ({workers})" for workers in WORKERS)

    def ratio(says: str, one: int, other: int, low: float = -math.inf, high: float = math.inf) -> Clause:
        setups = papers.downpour(one), papers.downpour(other)

        def relative(seed: int) -> float:
            first, second = (found.time_to(setup.with_seed(seed), target) for setup in setups)
            return first / second

        return found.decide(says, setups, exact(found.by_seed(relative)), _NEAR_TIMES, low, high)

    text = (
        f"to cross-entropy {target:.2f}: {times}. (Our first limit was half of the time of 2. It was loosened once, after the"
        " result had been seen; it is back.)"
    )
    return text, [
        ratio("8 need at most half of the time of 2", 8, 2, high=0.5),
        ratio("8 need a third of the time of 2", 8, 2, 0.9 / 3, 1.1 / 3), ratio("16 slower than 8", 16, 8, low=1.0),
        ratio("16 slower than 4", 16, 4, low=1.0),
    ]  # fmt: skip


def _f2(found: SeededRuns) -> Judged:
    several = (2, 4, 8)  # the paper compares these
    end = found.curve(papers.downpour(8))[-1]["seconds"]
    shown, clauses = [], []
    for time, says, low, high in ((end / 4, "start worse than", 1.0, math.inf), (end, "end better than", -math.inf, 1.0)):
        after = [found.after(papers.downpour(workers), time, "seconds") for workers in several]
        shown.append(f"{_list(after)} after {time:,.0f} s")
        for one, other in pairwise(several):
            setups = papers.downpour(other), papers.downpour(one)
            values = found.by_seed(partial(_ratio_at, found, setups, time))
            clauses.append(found.decide(f"{other} {says} {one}", setups, exact(values), _NEAR, low, high))
    adagrad, sgd = ((papers.downpour(8, name), papers.downpour(2, name)) for name in ("adagrad", "sgd"))

    def relative(seed: int) -> float:
        return _ratio_at(found, adagrad, WORDS, seed, "words") / _ratio_at(found, sgd, WORDS, seed, "words")

    says = "AdaGrad loses less than SGD"
    clauses.append(found.decide(says, (*adagrad, *sgd), exact(found.by_seed(relative)), _NEAR, high=1.0))
    text = f"cross-entropy of {', '.join(map(str, several))} workers {', '.join(shown)}; after equal words, 8 relative to 2"
    lost = {name: after_words(found, its[0]) / after_words(found, its[1]) for name, its in (("AdaGrad", adagrad), ("SGD", sgd))}
    return f"{text}: {_named(lost)}", clauses


def _ratio_at(found: SeededRuns, setups: tuple[Setup, Setup], place: float, seed: int, of: str = "seconds") -> float:
    first, second = (found.after(setup.with_seed(seed), place, of) for setup in setups)
    return first / second


def _a1(found: SeededRuns) -> Judged:
    """Each with the best of its rates; if this is the lowest or the highest one tried, nothing is known."""
    best, text, inside = {}, [], True
    for name, rates in papers.TUNED.items():
        rate = min(rates, key=lambda rate: found.after(rates[rate], WORDS))
        best[name] = rates[rate]
        inside = inside and rate not in (next(iter(rates)), next(reversed(rates)))
        text.append(f"{name} {after_words(found, rates[rate]):.3f} (rate {rate})")
    clauses = [
        _compared(found, "better than without this division", best["staleness-aware"], best["asynchronous"], high=1.0),
        _compared(found, "almost as synchronous ones", best["staleness-aware"], best["sync"], high=_SAME),
    ]
    if not inside:
        clauses = [Clause(f"{clause.says} (the best rate may lie outside those tried)", None) for clause in clauses]
    return f"cross-entropy after equal words: {', '.join(text)}", clauses


def _a2(found: SeededRuns) -> Judged:
    setups = {1: papers.AWARE} | {bundle: papers.softsync(bundle) for bundle in BUNDLES}
    stale = [found.measure(setup, "staleness") for setup in setups.values()]
    rows = zip(setups, stale, setups.values(), strict=True)
    shown = "; ".join(f"n = {n}: {old:.1f} updates old, {after_words(found, setup):.3f}" for n, old, setup in rows)

    def between(seed: int) -> float:
        first, *others, _ = (found.after(setup.with_seed(seed), WORDS) for setup in setups.values())
        sync = found.after(papers.TOGETHER.with_seed(seed), WORDS)
        return float(all(min(first, sync) <= value <= max(first, sync) for value in others))

    clauses = [
        Clause("staleness falls with n", all(b < a for a, b in pairwise(stale))),
        _compared(found, "n = workers learns as sync", setups[BUNDLES[-1]], papers.TOGETHER, 2 - _SAME, _SAME),
    ]
    lies, both = exact(found.by_seed(between)), (*setups.values(), papers.TOGETHER)
    clauses.append(found.decide("cross-entropy lies between both", both, lies, near=1.0, low=0.5))  # always by three seeds
    return f"{shown}; sync: {after_words(found, papers.TOGETHER):.3f} (cross-entropy after equal words)", clauses


def _sent(found: Runs, setup: Setup) -> float:
    return found.measure(setup, "timing bytes/word of the first rank")


def _list(values: Sequence[float], digits: int = 3) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in values)


def _named(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in values.items())


CLAIMS: tuple[Claim[SeededRuns], ...] = (
    Claim("P1", "Pipe-SGD 4", "pipe is 2.0 to 3.2 times as fast as sync, 4.0 to 5.4 times as a synchronous server", _p1),
    Claim("P2", "Pipe-SGD Eq. 4, 5, 7",
          "a step takes as long as the longer of computation and exchange; efficiency is 1 if computation is longer", _p2),
    Claim("P3", "Pipe-SGD 3.1", "widths above 2 only do harm", _p3),
    Claim("P4, bytes", "Pipe-SGD 4", "half and a quarter of the bytes", _p4_bytes),
    Claim("P4, quality", "Pipe-SGD 4", "as good as sync, with warm-up", _p4_quality,
          "rate, warm-up and beta1 are those of sync; whether others would help pipe was not tried"),
    Claim("S1, speed", "Strom Table 2", "4.3, 8.7, 17, 33, 54 times one node's speed with 5, 10, 20, 40, 80 nodes", _s1_speed),
    Claim("S1, quality", "Strom Table 2", "no loss of quality (here: five nodes, without the recipe of 3.3)", _s1_quality,
          "rate, warm-up and beta1 are those of one node; with tuned ones, four workers still need 1.5 times its words"
          " (comparison.md)"),
    Claim("S2", "Strom Table 3",
          "messages are 278 to 12,978 times smaller as tau grows; quality holds over a wide range, then falls", _s2),
    Claim("S3", "Strom 2.5", "10 to 11 bits per update by Golomb-Rice coding", _s3,
          "at this density, gaps between independent elements have an entropy of 11.2 bits, plus one bit for the sign"),
    Claim("F1", "Farrell & Yang 6", "8 workers need a third of the time of 2; 16 are slower than 4 and 8", _f1),
    Claim("F2", "Farrell & Yang 7", "AdaGrad suits many workers, which start worse and end better", _f2),
    Claim("A1", "Arnold 3.3", "divided by staleness, asynchronous updates converge almost as well as synchronous ones", _a1),
    Claim("A2", "Arnold 3.3", "n-softsync goes from asynchronous (n = 1) to synchronous (n = workers)", _a2),
)  # fmt: skip
