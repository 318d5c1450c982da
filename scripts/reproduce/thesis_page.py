"""The reproduction of the thesis as a page: a tally, tables of its claims, and its figures 4.1 to 4.19."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

from reproduce import hosts
from reproduce.claims import judged, table, tally, verdict
from reproduce.runs import CURVES, MEASURES, Missing, Runs, Setup
from reproduce.seeded import SEEDS
from reproduce.thesis import (
    BASE,
    ONCE,
    SLOW_CODEC,
    SPARSE,
    SPARSE_OVERLAP,
    STEPS,
    VISITS,
    WORDS,
    Results,
    SlowCodec,
    trained,
)
from reproduce.thesis_claims import CLAIMS
from reproduce.thesis_pictures import draw, shown
from reproduce.thesis_settings import TRIED, one_device

_ABOUT = """# The thesis's experiments on simulated clusters

**Of {claims} claims of the thesis (Neckermann 2017), {tally}.** All is simulated (s), each run once (1) unless said.
`scripts/reproduce/thesis --fresh` repeats everything in some eight core-hours, `--timings` the words/s in minutes; without
options, it runs what thesis/{curves} (every validation of every run) and thesis/{measures} lack, and makes this page.
{finding}
*NxM* is a cluster of N machines (its *nodes*) with M devices (*GPUs*) each; every device has one worker. Every run trains the
preset tiny with 2 + 2 layers on Multi30k, with 64 sentences per batch and worker, and the options of
configs/thesis-virtual.yml. Time is simulated: K40 GPUs, a network of 375 MB/s, 110.7M parameters
(configs/clusters/thesis-*.yml). Words/s are those of {steps} steps per device without training.

## Limits

- *Visits*. With 99.9% dropped, an element travels once in 1,000 updates, so how often it travels in a run, its *visits*,
  depends on the run's length. The thesis names runs of 4 and 6 hours: 10 to 15 visits with the batches of 1.4 s charged
  here, 40 to 65 with three per second. Runs here have 1,600 updates per device: the sparse modes send 6.25%, and pay on the
  simulated clock for 0.1%, which gives {visits} visits. On 4x1, 20 and 100 visits end alike, 2 far behind
  ([archive](archive/thesis-settings.md)). Words/s and bytes (T10, T11, T14, T20, T21, T23, T24, T29) are those of 0.1%.
- *Fitted constants* are no findings: the bus, so that eight devices of one machine process 4.3 times as many words/s as one
  (T1); the time of a batch, so that a machine of vanilla 4x1 processes a third of the words/s of 1x1 (T5).
- *Assumed costs* (configs/clusters/k40.yml) follow from a memory bandwidth of 200 GB/s. Encoding and decoding take 3% to 7% of
  the time here; the thesis says that its sparse exchanges take longer than those of a single node (4.2.4), which take 13% to
  23%. T15, T20 and T23 depend on this.{flips}
- *The model* is a small transformer on Multi30k, charged as one of 110.7M parameters; the thesis does not name its corpus, and
  its model was probably a recurrent network.
- *Optimizer settings* are those that were best for `thesis-sparse` on 4x1 and 4x2, of eight, in an experiment that was
  planned before it ran ([archive](archive/thesis-settings.md)), and the same in all runs, as in the thesis, which gives Adam
  and an initial rate of 0.0002.

Not repeated: model parallelism, lock-free Hogwild, and the comparisons with other systems that the thesis cites (2.3.7: its
figures on delayed updates are Langford's; 4.3: Downpour, 1-bit SGD).

## How claims are judged

A *speed* of 1.5x means: two thirds of the simulated time to the target. The target is the cross-entropy of 1x1 after 95% of its
{words} words{target}. A run reaches it when a line fitted to five successive validations has fallen to it. A run that takes 12%
longer than 1x1 is ended (60% longer in mode overlap without a bound, which the thesis calls much worse). If one of two runs has
not reached the target, they are compared by the time to the lowest cross-entropy that both have reached.

A claim of the thesis consists of clauses. What its words mean here (the limits of each clause are in
scripts/reproduce/thesis_judges.py):

| the thesis says | here |
|---|---|
| a number | within 10% |
| as fast | 0.9x to 1.1x |
| slower | below 0.9x |
| much worse | below two thirds |
| barely slower | takes less than 1.1 times as long |
| practically nothing, a small fraction | less than 10% |
| considerable | 10% or more |
| linear, constant | within 5% |
| more than linear | words/s of a node never fall with more nodes, from a single one on, and end at least 1% higher |
| above | at most 0.1% below |

Runs have one seed (1x1: three); where a ratio is within 10% of its limit, three seeds decide, and until they are trained, or if
they disagree, the clause is undecided. A claim about an order says nothing where no cluster is better than one device (T13,
T15, T19, T22): a clause asks for this. Limits were set before these runs, but after earlier versions of them, and some were
corrected since ([archive](archive/thesis-limits.md)).
"""


_CLUSTERS = ("2x1", "3x1", "4x1")  # of which the page says first what they gain


def write(found: Results, runs: Path, output: Path) -> None:
    """Write `output` (Markdown) from the CSV files of `found`; timelines need their runs in the folder `runs`."""
    pictures = output.with_suffix("")
    titles = draw(found, runs, pictures)
    claims = [claim for claims in CLAIMS.values() for claim in claims]
    try:
        target = f": {found.target():.3f}"
    except Missing:
        target = ""
    about = _ABOUT.format(
        claims=len(claims), tally=tally(claims, found), curves=CURVES, measures=MEASURES, steps=STEPS, visits=VISITS,
        flips=_flips(found), finding=_finding(found),
        words=f"{WORDS:,}", target=target,
    )  # fmt: skip
    text = [about]
    for title, its in CLAIMS.items():
        text += [f"## {title}", "", *table(its, found, "figure", "the thesis")]
    text += [
        *_equal_words(found),
        *hosts.section(Runs(pictures / "hosts")),
        "## Figures",
        "",
        "A cross is what the thesis's text says; a dotted line is linear.",
        "",
    ]
    for figure in sorted(titles, key=lambda name: (int(name[2:].rstrip("ab")), name)):
        where = (pictures / f"figure-{figure}.svg").relative_to(output.parent)
        text += [f"Figure {figure}: {titles[figure]}", "", f"![figure {figure}]({where})", ""]
    output.write_text("\n".join(text), encoding="utf-8")


def _finding(found: Results) -> str:
    """The two main results, as a paragraph."""
    try:
        speeds = ", ".join(f"{found.faster(SPARSE, name)} ({name})" for name in _CLUSTERS)
        overlap = [found.ratio(Setup(SPARSE, name), Setup(SPARSE_OVERLAP, name)) for name in _CLUSTERS[1:]]
    except Missing:
        return ""
    return f"""
Sparse messages, which travel often enough (see *Visits*): {speeds} as fast to the same cross-entropy as one
device with the same settings; the thesis has 1.25x, 1.8x and 2.5x. Overlap on top of them: {" and ".join(map(str, overlap))} of
the speed without it (3x1, 4x1); the thesis has about 1x (T15).{_own_best(found)}
"""


def _own_best(found: Results) -> str:
    """How one device does with the best of its own settings that were run, as a sentence; empty without these runs."""
    settings = Runs(found.folder / "settings")
    times = {its: settings.time_to(one_device(its), found.target()) for its in TRIED if settings.trained(one_device(its))}
    if not times:
        return ""
    best = min(times, key=lambda its: times[its])
    base = mean(found.time_to(BASE.with_seed(seed), found.target()) for seed in SEEDS)
    own = base / times[best]
    speeds = ", ".join(f"{mean(found.faster(SPARSE, name).values) / own:.2f}x ({name})" for name in _CLUSTERS)
    return f"""

**Tuned apart, clusters hardly gain.** These settings suit sparse messages. With others that suit it better (rate
{best.rate:g}, {best.schedule}; tried: {len(times)} of 8), one device is {own:.2f} times as soon there; against it, the same
clusters are {speeds} as fast (1)."""


def _flips(found: Results) -> str:
    """Which verdicts about words/s are others if sparse codecs are slower, as a sentence."""
    if not found.timed(Setup(SPARSE, "4x1", SLOW_CODEC)):
        return ""
    slow, others = SlowCodec(found.folder), []
    for claim in CLAIMS["Sparse exchanges"]:
        clauses, its = judged(claim, found)[1], judged(claim, slow)[1]
        if clauses and its and verdict(clauses) != verdict(its):
            others.append(f"{claim.id} {verdict(its)}")
    return f" With codecs four times as slow, which 4.2.4 would fit: {'; '.join(others) or 'the same verdicts'}."


def _equal_words(found: Results) -> list[str]:
    behind = found.behind([setup for setup in trained() if setup != ONCE])
    if not behind:
        return []
    lines = [
        f"## Validation cross-entropy after {WORDS / 1e6:g}M words", "",
        "| mode and cluster | difference to 1x1 (positive is worse) |", "|---|---|",
    ]  # fmt: skip
    rows = sorted((shown(setup), share) for setup, share in behind.items())
    return [*lines, *(f"| {name} | {share:+.1%} |" for name, share in rows), ""]
