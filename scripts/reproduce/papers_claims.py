"""The claims of four papers, P1 to A2, judged by runs on virtual clusters like theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reproduce import papers
from reproduce.claims import Claim, verdict
from reproduce.papers import BATCHES, BUNDLES, CODECS, SPEEDS, TAUS, WIDTHS, WORDS, WORKERS
from reproduce.runs import Runs, Setup


def pace(found: Runs, setup: Setup) -> float:
    """Words per second of a worker."""
    timing = found.timing(setup)
    return float(timing["words_per_second"]) / len(timing["ranks"])


def speedups(found: Runs) -> dict[str, list[float]]:
    """Speedup of pipe with its faster codec over sync and over a synchronous server, at each of BATCHES."""
    best = [max(pace(found, papers.pipe(seconds, codec)) for codec in CODECS) for seconds in BATCHES]
    others = {"sync": papers.all_reduce, "a synchronous server": papers.by_server}
    return {
        name: [quick / pace(found, setup(seconds)) for seconds, quick in zip(BATCHES, best, strict=True)]
        for name, setup in others.items()
    }


def _p1(found: Runs) -> tuple[str, str]:
    ratios = speedups(found)
    batches = ", ".join(f"{seconds:g}" for seconds in BATCHES)
    rows = [f"{_list(values, 1)} times as fast as {name}" for name, values in ratios.items()]
    sync, server = ratios.values()
    size = _meet(sync, 2.0, 3.2) and _meet(server, 4.0, 5.4)
    return f"with batches of {batches} s: {'; '.join(rows)}", verdict(min(*sync, *server) > 1, size)


def efficiencies(found: Runs, codec: str) -> list[float]:
    """Speed of a worker in a pipeline of four, relative to the same worker alone, at each of BATCHES (Eq. 7)."""
    return [pace(found, papers.pipe(seconds, codec)) / pace(found, papers.alone(seconds)) for seconds in BATCHES]


def _p2(found: Runs) -> tuple[str, str]:
    errors, bound = [], []
    for codec in CODECS:
        exchange = 1 / pace(found, papers.pipe(BATCHES[0], codec))
        for seconds in BATCHES[1:]:
            own, time = 1 / pace(found, papers.alone(seconds)), 1 / pace(found, papers.pipe(seconds, codec))
            errors.append(abs(time / max(own, exchange) - 1))
            if own > exchange:
                bound.append(own / time)
    text = (
        f"step time within {max(errors):.1%} of the longer of the two; efficiency where computation is longer:"
        f" {_list(bound, 2)}"
    )
    return text, verdict(max(errors) < 0.2, max(errors) < 0.07 and all(its > 0.93 for its in bound))


def _p3(found: Runs) -> tuple[str, str]:
    after = {width: found.after(papers.of_width(width), WORDS) for width in WIDTHS}
    two, three = (pace(found, papers.timed_width(width)) for width in WIDTHS[:2])
    learnt = ", ".join(f"{value:.3f} ({width})" for width, value in after.items())
    text = f"cross-entropy after equal words by width: {learnt}; words/s at width 3: {three / two:.2f} times those at width 2"
    values = list(after.values())
    return text, verdict(three / two < 1.02 and values[-1] > values[0], values == sorted(values))


def _p4(found: Runs) -> tuple[str, str]:
    dense = found.sent_per_word(papers.all_reduce(BATCHES[2]))
    shares = {codec: found.sent_per_word(papers.pipe(BATCHES[2], codec)) / dense for codec in CODECS}
    after = {"sync": found.after(papers.SYNC, WORDS)}
    after |= {codec: found.after(setup, WORDS) for codec, setup in papers.WARMED.items()}
    text = f"share of the bytes of sync: {_named(shares)}; cross-entropy after equal words: {_named(after)}"
    fewer = abs(shares["half"] - 0.5) < 0.01 and abs(shares["int8"] - 0.25) < 0.01
    return text, verdict(fewer, max(after[codec] for codec in CODECS) < 1.02 * after["sync"])


def relative_speeds(found: Runs) -> dict[int, float]:
    """Words per second of all workers relative to one worker, by number of nodes."""
    one = pace(found, papers.strom_nodes(1))
    return {nodes: nodes * pace(found, papers.strom_nodes(nodes)) / one for nodes in SPEEDS}


def _s1(found: Runs) -> tuple[str, str]:
    speeds = relative_speeds(found)
    alone, many = (found.after(setup, WORDS) for setup in (papers.STROM_ALONE, papers.strom_coding("words")))
    shown = ", ".join(f"{speed:.1f} ({nodes})" for nodes, speed in speeds.items() if nodes > 1)
    text = f"{shown}; cross-entropy after equal words {many:.3f} (five workers), {alone:.3f} alone"
    near = all(abs(speeds[nodes] / paper - 1) < 0.25 for nodes, paper in SPEEDS.items())
    return text, verdict(all(speed > 0.6 * nodes for nodes, speed in speeds.items()), near and many < 1.02 * alone)


def compressions(found: Runs) -> dict[float, tuple[float, float]]:
    """By threshold: the compression ratio (gradient size / message size), and cross-entropy after equal words."""
    return {tau: _compression(found, papers.strom_tau(tau)) for tau in TAUS}


def _compression(found: Runs, setup: Setup) -> tuple[float, float]:
    full = 4 * found.timing(papers.STROM_ALONE)["elements"]
    return full / _message(found, setup), found.after(setup, WORDS)


def _s2(found: Runs) -> tuple[str, str]:
    found_by = compressions(found)
    times, quality = [pair[0] for pair in found_by.values()], [pair[1] for pair in found_by.values()]
    fine = [its for its, value in zip(times, quality, strict=True) if value < 1.03 * min(quality)]
    shown = {f"tau {tau:g}": pair for tau, pair in found_by.items()}
    shown["tau adapted to 1/846 of the elements"] = _compression(found, papers.strom_coding("words"))
    text = "; ".join(f"{name}: {its:,.0f} times, {value:.3f}" for name, (its, value) in shown.items())
    falls = times == sorted(times) and quality[-1] > 1.03 * min(quality)
    return f"{text} (cross-entropy after equal words)", verdict(falls, max(fine) > 4 * min(fine) and max(times) > 1000)


def _s3(found: Runs) -> tuple[str, str]:
    rice, words = (_message(found, papers.strom_coding(coding)) for coding in ("golomb-rice", "words"))
    bits = 32 * rice / words
    return f"{bits:.1f} bits, including the sign", verdict(bits < 16, bits < 11.5)


def _f1(found: Runs) -> tuple[str, str]:
    target = max(found.after(papers.downpour(workers), WORDS) for workers in WORKERS)
    times = {workers: found.time_to(papers.downpour(workers), target) for workers in WORKERS}
    shown = ", ".join(f"{time:,.0f} s ({workers})" for workers, time in times.items())
    text = f"to cross-entropy {target:.2f}: {shown}"
    return text, verdict(times[8] < min(times[2], times[16]), times[8] < times[2] / 2.5)


def _f2(found: Runs) -> tuple[str, str]:
    several = WORKERS[1:]
    end = found.validations(papers.downpour(several[-1]))[-1]["seconds"]
    first, last = ([found.after(papers.downpour(workers), time, "seconds") for workers in several] for time in (end / 4, end))
    lost = {
        name: found.after(papers.downpour(8, name), WORDS) - found.after(papers.downpour(2, name), WORDS)
        for name in ("adagrad", "sgd")
    }
    text = (
        f"cross-entropy of {', '.join(map(str, several))} workers {_list(first)} after {end / 4:,.0f} s, {_list(last)} after"
        f" {end:,.0f} s; after equal words, 8 workers differ from 2 by {lost['adagrad']:+.2f} (AdaGrad),"
        f" {lost['sgd']:+.2f} (SGD)"
    )
    falling = last == sorted(last, reverse=True)
    return text, verdict(last[2] < last[0], falling and first == sorted(first) and lost["adagrad"] < lost["sgd"])


def _a1(found: Runs) -> tuple[str, str]:
    setups = {"sync": papers.TOGETHER, "asynchronous": papers.ASYNC, "staleness-aware": papers.AWARE}
    after = {name: found.after(setup, WORDS) for name, setup in setups.items()}
    near, nearer = after["staleness-aware"] < 1.03 * after["sync"], after["staleness-aware"] < after["asynchronous"]
    return f"cross-entropy after equal words: {_named(after)}", verdict(near or nearer, near)


def _a2(found: Runs) -> tuple[str, str]:
    setups = {1: papers.ASYNC} | {bundle: papers.softsync(bundle) for bundle in BUNDLES}
    stale = [found.staleness(setup) for setup in setups.values()]
    after = [found.after(setup, WORDS) for setup in setups.values()]
    sync = found.after(papers.TOGETHER, WORDS)
    rows = zip(setups, stale, after, strict=True)
    shown = "; ".join(f"n = {n}: {old:.1f} updates old, {value:.3f}" for n, old, value in rows)
    text = f"{shown}; sync: {sync:.3f} (cross-entropy after equal words)"
    return text, verdict(stale == sorted(stale, reverse=True), abs(after[-1] / sync - 1) < 0.03)


def _message(found: Runs, setup: Setup) -> float:
    """Mean bytes per training message."""
    messages, size, _ = found.sent(setup)
    return size / messages


def _list(values: Sequence[float], digits: int = 3) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in values)


def _named(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in values.items())


def _meet(values: Sequence[float], low: float, high: float) -> bool:
    """Whether some of `values` lie in a range."""
    return any(low <= value <= high for value in values)


CLAIMS: tuple[Claim[Runs], ...] = (
    Claim(
        "P1",
        "Pipe-SGD 4",
        "pipe is 2.0 to 3.2 times as fast as sync, 4.0 to 5.4 times as a synchronous server",
        _p1,
        "the ratios depend on the computation time of a batch, and their range includes the paper's",
    ),
    Claim(
        "P2",
        "Pipe-SGD Eq. 4, 7",
        "a step takes as long as the longer of computation and exchange; efficiency is 1 if computation is longer",
        _p2,
    ),
    Claim("P3", "Pipe-SGD 3.1", "widths above 2 only do harm", _p3),
    Claim(
        "P4",
        "Pipe-SGD 4",
        "half and a quarter of the bytes; as good as sync, with warm-up",
        _p4,
        "half differs from sync only in its delay of one step (without warm-up, the delay costs more, see P3); int8 also loses"
        " rounding errors, because a ring all-reduce has no error feedback",
    ),
    Claim(
        "S1",
        "Strom Table 2",
        "4.3, 8.7, 17, 33, 54 times one node's speed with 5, 10, 20, 40, 80 nodes; no loss of quality",
        _s1,
        "only messages slow down a simulated worker; five workers learn less from the same words (cause not found)",
    ),
    Claim(
        "S2",
        "Strom Table 3",
        "messages are 278 to 12,978 times smaller as tau grows; quality holds over a wide range, then falls",
        _s2,
        "with a fixed tau, quality falls gradually over the whole range; with tau adapted to 1/846, it hardly falls",
    ),
    Claim(
        "S3",
        "Strom 2.5",
        "10 to 11 bits per update by Golomb-Rice coding",
        _s3,
        "at this density, gaps between independent elements have an entropy of 11.2 bits, plus one bit for the sign",
    ),
    Claim(
        "F1",
        "Farrell & Yang 6",
        "8 workers need a third of the time of 2; 16 are slower than 8",
        _f1,
        "from 2 to 8 workers, words/s grow 3.4 times, but gradients are seven updates stale and reduce cross-entropy less",
    ),
    Claim(
        "F2",
        "Farrell & Yang 7",
        "AdaGrad suits many workers, which start worse and end better",
        _f2,
        "up to eight workers, more workers are better already after a quarter of the time",
    ),
    Claim(
        "A1",
        "Arnold 3.3",
        "divided by staleness, asynchronous updates converge almost as well as synchronous ones",
        _a1,
        "updates without this division come closer; here, asynchronous modes use less momentum and a longer warm-up"
        " (optimizer.async_beta1, async_warmup)",
    ),
    Claim(
        "A2",
        "Arnold 3.3",
        "n-softsync goes from asynchronous (n = 1) to synchronous (n = workers)",
        _a2,
        "staleness does, cross-entropy does not; the likely cause is that momentum is lowered for single pushes"
        " (optimizer.async_beta1) but not for large bundles, which are nearly one update stale",
    ),
)
