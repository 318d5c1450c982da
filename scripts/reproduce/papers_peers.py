"""Judges of the claims of Pipe-SGD and Strom, whose workers exchange without a server."""

from __future__ import annotations

from reproduce import papers, pipe_sgd_equations
from reproduce.claims import Clause, Judged
from reproduce.papers import BATCHES, CODECS, SPEEDS, TAUS, WIDTHS
from reproduce.papers_compared import SAME, after_words, compared, learned, named, pace
from reproduce.runs import Runs, Setup
from reproduce.seeded import SeededRuns


def speedups(found: Runs) -> dict[str, list[float]]:
    """Speedup of pipe with its faster codec over sync and over a synchronous server, at each of BATCHES."""
    best = [max(pace(found, papers.pipe(seconds, codec)) for codec in CODECS) for seconds in BATCHES]
    others = {"sync": papers.all_reduce, "a synchronous server": papers.by_server}
    return {
        name: [quick / pace(found, setup(seconds)) for seconds, quick in zip(BATCHES, best, strict=True)]
        for name, setup in others.items()
    }


def p1(found: Runs) -> Judged:
    ratios = speedups(found)
    rows = zip(BATCHES, *ratios.values(), strict=True)
    both = [
        f"{seconds:g} s: {one:.1f} and {two:.1f} times" for seconds, one, two in rows if 2.0 <= one <= 3.2 and 4.0 <= two <= 5.4
    ]
    text = f"both with batches of {'; '.join(both)}" if both else f"both with none of {len(BATCHES)} batch times"
    return text, [Clause("both ranges with the same batch", bool(both), fitted=True)]


def efficiencies(found: Runs, codec: str) -> list[float]:
    """Speed of a worker in a pipeline of four, relative to the same worker alone, at each of BATCHES (Eq. 7)."""
    return [pace(found, papers.pipe(seconds, codec)) / pace(found, papers.alone(seconds)) for seconds in BATCHES]


def p2(found: Runs) -> Judged:
    """Relative to the duration of an exchange that Eq. 5 predicts from the cluster file, without any simulation."""
    errors, bound = [], dict[str, float]()
    for codec in CODECS:
        for seconds, efficiency in zip(BATCHES, efficiencies(found, codec), strict=True):
            its = papers.predicted(codec)
            predicted = pipe_sgd_equations.scaling_efficiency(its.l_up, seconds, its.l_comm)
            errors.append(abs(efficiency / predicted - 1))
            if predicted == 1:
                bound[f"{codec} with {seconds:g} s"] = efficiency
    worst = min(bound, key=lambda where: bound[where])
    text = f"efficiency within {max(errors):.1%} of Eq. 5 and 7; at least {bound[worst]:.2f} ({worst}) if computation is longer"
    return text, [
        Clause("as in Eq. 5 and 7, within 10%", max(errors) < 0.1),
        Clause("efficiency 1, within 5%", min(bound.values()) > 0.95),
    ]  # fmt: skip


def trained_speed(found: Runs, setup: Setup) -> float:
    """Words per second in the second half of a training run; a wide pipeline waits only after many steps."""
    curve = found.curve(setup)
    middle, end = curve[len(curve) // 2], curve[-1]
    return float((end["words"] - middle["words"]) / (end["seconds"] - middle["seconds"]))


def p3(found: SeededRuns) -> Judged:
    by_width = ", ".join(f"{width}: {learned(found, papers.of_width(width))}" for width in WIDTHS)
    two, *more = (trained_speed(found, papers.of_width(width)) for width in WIDTHS)
    text = f"cross-entropy, width {by_width}; words/s at most {max(more) / two:.3f} of width 2"
    clauses = [Clause("no faster", max(more) / two < SAME)]
    clauses += [
        compared(found, f"width {width} learns less", papers.of_width(width), papers.of_width(2), low=1.0)
        for width in WIDTHS[1:]
    ]
    return text, clauses


def p4_bytes(found: Runs) -> Judged:
    dense = _sent(found, papers.all_reduce(BATCHES[2]))
    shares = {codec: _sent(found, papers.pipe(BATCHES[2], codec)) / dense for codec in CODECS}
    clauses = [Clause(codec, abs(shares[codec] - share) < 0.01) for codec, share in (("truncated", 0.5), ("int8", 0.25))]
    shown = ", ".join(f"{codec} {share:.3f}" for codec, share in shares.items())
    return f"share of the bytes of sync: {shown}", clauses


def p4_quality(found: SeededRuns) -> Judged:
    clauses = [compared(found, codec, papers.WARMED[codec], papers.SYNC, high=SAME) for codec in CODECS]
    return f"cross-entropy: {named(found, {'sync': papers.SYNC, **papers.WARMED})}", clauses


def relative_speeds(found: Runs) -> dict[int, float]:
    """Words per second of all workers relative to one worker, by number of nodes."""
    one = pace(found, papers.strom_nodes(1))
    return {nodes: nodes * pace(found, papers.strom_nodes(nodes)) / one for nodes in SPEEDS}


def s1_speed(found: Runs) -> Judged:
    speeds = relative_speeds(found)
    shown = ", ".join(f"{nodes}: {speed:.1f}" for nodes, speed in speeds.items() if nodes > 1)
    clauses = [Clause(f"{nodes} nodes", abs(speeds[nodes] / its - 1) < 0.1) for nodes, its in SPEEDS.items() if nodes > 1]
    return shown, clauses


def s1_quality(found: SeededRuns) -> Judged:
    setups = {"one node": papers.STROM_ALONE, "five": papers.strom_coding("words")}
    others = {name: after_words(found, setup) for name, setup in papers.STROM_VARIANTS.items()}
    best = min(others, key=lambda name: others[name])
    text = f"cross-entropy: {named(found, setups)}; with {best} {others[best]:.3f}"
    return text, [compared(found, "no loss", papers.strom_coding("words"), papers.STROM_ALONE, high=SAME)]


def compressions(found: SeededRuns) -> dict[float, tuple[float, float]]:
    """By threshold: the compression ratio (gradient size / message size), and cross-entropy after equal words."""
    return {tau: _compression(found, papers.strom_tau(tau)) for tau in TAUS}


def _compression(found: SeededRuns, setup: Setup) -> tuple[float, float]:
    full = 4 * found.measure(papers.STROM_ALONE, "timing elements")
    return full / found.measure(setup, "bytes/message"), after_words(found, setup)


def s2(found: SeededRuns) -> Judged:
    """Quality is compared with one node alone, as in the paper's table. It can fall only if it held before."""
    times = [its for its, _ in compressions(found).values()]
    as_good = [compared(found, f"tau {tau:g}", papers.strom_tau(tau), papers.STROM_ALONE, high=SAME).holds for tau in TAUS]
    fine, maybe = (
        [its for its, good in zip(times, as_good, strict=True) if good in kinds] for kinds in ((True,), (True, None))
    )
    wide, perhaps = (bool(its) and max(its) > 4 * min(its) for its in (fine, maybe))
    falls = compared(found, "then falls", papers.strom_tau(TAUS[-1]), papers.STROM_ALONE, low=SAME).holds
    held = True if fine else None if maybe else False
    clauses = [
        Clause("quality holds over a wide range (four times)", wide if wide == perhaps else None),
        Clause("then falls", False if falls is False else held and falls),
    ]  # fmt: skip
    ends = [after_words(found, papers.strom_tau(tau)) for tau in TAUS]
    text = (
        f"five nodes: cross-entropy {min(ends):.3f} to {max(ends):.3f} (figure s2), {adapted(found)[1]:.3f} with tau adapted;"
        f" one node {learned(found, papers.STROM_ALONE)}"
    )
    return text, clauses


def adapted(found: SeededRuns) -> tuple[float, float]:
    """As `compressions`, with a threshold that adapts."""
    return _compression(found, papers.strom_coding("words"))


def s3(found: Runs) -> Judged:
    rice, words = (found.measure(papers.strom_coding(coding), "bytes/message") for coding in ("golomb-rice", "words"))
    bits = 32 * rice / words
    return f"{bits:.1f} bits, including the sign", [Clause("10 to 11 bits", 10 <= bits <= 11)]


def _sent(found: Runs, setup: Setup) -> float:
    return found.measure(setup, "timing bytes/word of the first rank")
