"""The reproduction of the thesis as a page: a tally, tables of its claims, and its figures 4.1 to 4.19 in its own style."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nmt_train.report import timeline
from nmt_train.report.figure import new_figure, save_figure
from reproduce.claims import judged, table, tally, verdict
from reproduce.runs import CURVES, MEASURES, Missing, Setup
from reproduce.thesis import (
    BASE,
    BOUND,
    ONCE,
    REMOTE,
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

# By figure: whose trace it shows, and what there is to see.
TRACED = {
    "4.1": (BASE, "one device: backward takes longest"),
    "4.2": (Setup("single", "1x4"), "four devices of one machine exchange after every batch"),
    "4.4": (Setup("vanilla", "2x1"), "vanilla, 2x1: exchanging takes longer than computing"),
    "4.7": (Setup("overlap", "2x1"), "overlap, 2x1: the main thread always computes, another one exchanges"),
    "4.11": (
        Setup(SPARSE, "2x1", REMOTE),
        "thesis-sparse, 2x1: exchanges are short (here also with the own shard, which needs no network)",
    ),
    "4.15": (
        Setup(SPARSE_OVERLAP, "2x1"), "thesis-sparse-overlap, 2x1: the main thread always computes, and exchanges are short",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class _Curves:
    """A figure of convergence. marks: by setup, how much faster than another the thesis says that it converges."""

    title: str
    setups: Sequence[Setup]
    marks: dict[Setup, tuple[Setup, float]]


def _of(mode: str, *clusters: str) -> list[Setup]:
    return [Setup(mode, cluster) for cluster in clusters]


_CURVES = {
    "4.3b": _Curves(
        "Devices of one machine: do they learn as much faster as they process words?",
        _of("single", "1x1", "1x2", "1x4", "1x8"), {},
    ),
    "4.6": _Curves("Vanilla: is one device ahead of every cluster?", [BASE, *_of("vanilla", "2x1", "2x2", "4x1", "4x2")], {}),
    "4.9": _Curves("Overlap: is 2x1 ahead of 2x2 and 4x1?", [BASE, *_of("overlap", "2x1", "2x2", "4x1")], {}),
    "4.10": _Curves(
        "Overlap: does it help to exchange at least every two steps?",
        [Setup("overlap", name, options) for name in ("2x1", "2x2") for options in ((), BOUND)],
        {Setup("overlap", "2x2", BOUND): (Setup("overlap", "2x2"), 1.4)},
    ),
    "4.13": _Curves(
        "Sparse, one device per machine", [BASE, Setup("single", "1x4"), *_of(SPARSE, "2x1", "3x1", "4x1")],
        {Setup(SPARSE, name): (BASE, times) for name, times in (("2x1", 1.25), ("3x1", 1.8), ("4x1", 2.5))},
    ),
    "4.14": _Curves(
        "Sparse, two devices per machine", [*_of("single", "1x2", "1x8"), *_of(SPARSE, "2x2", "3x2", "4x2")],
        {Setup(SPARSE, "3x2"): (Setup("single", "1x2"), 1.7), Setup(SPARSE, "4x2"): (Setup("single", "1x8"), 1.0)},
    ),
    "4.17": _Curves(
        "Sparse with and without overlap, one device per machine",
        [Setup(mode, name) for name in ("3x1", "4x1") for mode in (SPARSE, SPARSE_OVERLAP)], {},
    ),
    "4.18": _Curves(
        "Sparse with and without overlap, two devices per machine",
        [Setup(mode, name) for name in ("3x2", "4x2") for mode in (SPARSE, SPARSE_OVERLAP)],
        {Setup(SPARSE_OVERLAP, name): (Setup(SPARSE, name), 1.3) for name in ("3x2", "4x2")},
    ),
    "4.19": _Curves(
        "Sparse with overlap against one machine",
        [*_of("single", "1x1", "1x4", "1x8"), *_of(SPARSE_OVERLAP, "3x1", "4x2", "7x1")],
        {Setup(SPARSE_OVERLAP, name): (BASE, times) for name, times in (("3x1", 2.0), ("4x2", 4.0), ("7x1", 5.0))},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class _Bars:
    """Two figures of words/s: by devices of each of four machines, and by machines of two devices.

    linear: which of them the thesis calls linear (a, b). third: what it says of a machine of 4x1, relative to 1x1.
    """

    mode: str
    linear: str = ""
    third: bool = False


_BARS = {
    "4.5": _Bars("vanilla", third=True), "4.8": _Bars("overlap", linear="ab"), "4.12": _Bars(SPARSE, linear="b"),
    "4.16": _Bars(SPARSE_OVERLAP, linear="ab"),
}  # fmt: skip

_ABOUT = """# The thesis's experiments on simulated clusters

**Of {claims} claims of the thesis (Neckermann 2017), {tally}.** `scripts/reproduce/thesis` makes this page from
thesis/{curves} (every validation of every run) and thesis/{measures}.
{finding}
*NxM* is a cluster of N machines (its *nodes*) with M devices (*GPUs*) each; every device has one worker. Every run trains the
preset tiny with 2 + 2 layers on Multi30k, with 64 sentences per batch and worker, and the options of
configs/thesis-virtual.yml. Time is simulated: K40 GPUs, a network of 375 MB/s, 110.7M parameters
(configs/clusters/thesis-*.yml). Words/s are those of {steps} steps per device without training.

## Limits

- *Visits*. With 99.9% dropped, an element travels once in 1,000 updates. The thesis's runs have some 100,000 updates per
  device, so an element travels about {visits} times; a run here has 1,600. What decides how well sparse messages learn is
  updates times density, so the sparse modes train here with 6.25% instead of 0.1%, and pay on the simulated clock for 0.1%:
  {visits} visits, as in the thesis. Words/s and bytes (T10, T11, T14, T20, T21, T23, T24, T29) are those of 0.1%.
- *Fitted constants* are no findings: the bus, so that eight devices of one machine process 4.3 times as many words/s as one
  (T1); the time of a batch, so that a machine of vanilla 4x1 processes a third of the words/s of 1x1 (T5).
- *Assumed costs* (configs/clusters/k40.yml) follow from a memory bandwidth of 200 GB/s. Encoding and decoding take 4% to 6% of
  the time here; the thesis says that its sparse exchanges take longer than those of a single node (4.2.4), which take 13% to
  23%. T15, T20 and T23 depend on this.{flips}
- *The model* is a small transformer, charged as one of 110.7M parameters; we infer that the thesis's was a recurrent network.
- *Optimizer settings* were chosen by an experiment that was planned before it ran
  ([archive](archive/thesis-settings.md)). The thesis gives Adam and an initial rate of 0.0002.

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
T15, T19, T22): a clause asks for this. All limits were set before these runs.
"""


def write(found: Results, runs: Path, output: Path) -> None:
    """Write `output` (Markdown) from the CSV files of `found`; timelines need their runs in the folder `runs`."""
    pictures = output.with_suffix("")
    titles = {
        figure: title for figure, (setup, title) in TRACED.items()
        if _timeline(runs / "timing" / setup.name, pictures / f"figure-{figure}.png")
    }  # fmt: skip
    for figure, (title, draw) in _drawings(found).items():
        new, axes = new_figure(width=6.5, height=3.9)
        try:
            draw(axes)
        except Missing:
            continue
        axes.set_title(title, fontsize=10, loc="left")
        save_figure(new, pictures / f"figure-{figure}.png")
        titles[figure] = title
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
    text += [*_equal_words(found), "## Figures", "", "A cross is what the thesis's text says; a dotted line is linear.", ""]
    for figure in sorted(titles, key=lambda name: (int(name[2:].rstrip("ab")), name)):
        where = (pictures / f"figure-{figure}.png").relative_to(output.parent)
        text += [f"Figure {figure}: {titles[figure]}", "", f"![figure {figure}]({where})", ""]
    output.write_text("\n".join(text), encoding="utf-8")


def _timeline(run: Path, picture: Path) -> bool:
    """Draw the trace of a run, if it is there; whether there is a picture."""
    if (run / "finished").exists():
        timeline.plot(run, None, None, picture)
    return picture.exists()


def _finding(found: Results) -> str:
    """The two main results, as a paragraph."""
    clusters = ("2x1", "3x1", "4x1")
    try:
        speeds = ", ".join(f"{found.faster(SPARSE, name)} ({name})" for name in clusters)
        overlap = [found.ratio(Setup(SPARSE, name), Setup(SPARSE_OVERLAP, name)) for name in clusters[1:]]
    except Missing:
        return ""
    return f"""
Sparse messages, with as many visits (see *Limits*) as the thesis has: {speeds} as fast to the same cross-entropy as one device;
the thesis has 1.25x, 1.8x and 2.5x. Overlap on top of them: {" and ".join(map(str, overlap))} of the speed without it
(3x1, 4x1); the thesis has about 1x (T15).
"""


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
    rows = sorted((_shown(setup), share) for setup, share in behind.items())
    return [*lines, *(f"| {name} | {share:+.1%} |" for name, share in rows), ""]


def _shown(setup: Setup) -> str:
    return f"{setup.mode} {setup.cluster}" + ", bound 2" * (BOUND[0] in setup.options)


def _drawings(found: Results) -> dict[str, tuple[str, Callable[[Any], None]]]:
    """By figure: its title, and a function that draws it; it raises Missing if a run was not made."""
    drawings: dict[str, tuple[str, Callable[[Any], None]]] = {
        "4.3a": ("Devices of one machine: each adds less", partial(_one_machine, found))
    }
    for figure, bars in _BARS.items():
        a, b = f"{bars.mode}: words/s by devices of each of four machines", f"{bars.mode}: words/s by machines of two devices"
        drawings[f"{figure}a"] = (a, partial(_by_devices, found, bars))
        drawings[f"{figure}b"] = (b, partial(_by_machines, found, bars))
    for figure, its in _CURVES.items():
        drawings[figure] = (its.title, partial(_curves, found, its))
    return drawings


_OURS, _SINGLE = "#4e79a7", "#bbbbbb"  # a cluster, and one machine alone


def _one_machine(found: Results, axes: Any) -> None:
    devices = (1, 2, 4, 8)
    speeds = [found.speed(Setup("single", f"1x{n}")) for n in devices]
    _draw_bars(axes, range(4), speeds, _SINGLE)
    axes.plot([3], [4.3 * speeds[0]], "kx")
    _label(axes, devices, "devices", "words/s")


def _by_devices(found: Results, bars: _Bars, axes: Any) -> None:
    devices = (1, 2, 3, 4)
    alone = [found.speed(Setup("single", f"1x{n}")) for n in devices]
    speeds = [found.per_node(bars.mode, f"4x{n}") for n in devices]
    _draw_bars(axes, [n - 0.2 for n in range(4)], alone, _SINGLE, 0.4)
    _draw_bars(axes, [n + 0.2 for n in range(4)], speeds, _OURS, 0.4)
    if bars.third:
        axes.plot([0.2], [alone[0] / 3], "kx")
    if "a" in bars.linear:
        axes.plot([n + 0.2 for n in range(4)], [n * speeds[0] for n in devices], "k:", linewidth=1)
    _label(axes, devices, "devices per machine (gray: one machine alone)", "words/s of each machine")


def _by_machines(found: Results, bars: _Bars, axes: Any) -> None:
    machines = (1, 2, 3, 4, 5)
    speeds = [found.speed(Setup("single", "1x2")), *(found.speed(Setup(bars.mode, f"{n}x2")) for n in machines[1:])]
    _draw_bars(axes, [0], speeds[:1], _SINGLE)
    _draw_bars(axes, range(1, 5), speeds[1:], _OURS)
    if "b" in bars.linear:
        first = 2 if bars.mode == SPARSE else 0  # sparse is linear from three machines on
        axes.plot(range(first, 5), [n * speeds[first] / machines[first] for n in machines[first:]], "k:", linewidth=1)
    _label(axes, machines, "machines of two devices (gray: one machine alone)", "words/s of all machines")


def _draw_bars(axes: Any, places: Sequence[float], heights: Sequence[float], color: str, width: float = 0.6) -> None:
    axes.bar(places, heights, color=color, width=width)
    for place, height in zip(places, heights, strict=True):
        axes.text(place, height, f"{height:,.0f}", ha="center", va="bottom", fontsize=7)


def _label(axes: Any, names: Sequence[int], below: str, beside: str) -> None:
    axes.set_xticks(range(len(names)), [str(name) for name in names])
    axes.set_xlabel(below)
    axes.set_ylabel(beside)
    axes.grid(axis="x", visible=False)


def _curves(found: Results, figure: _Curves, axes: Any) -> None:
    """The thesis's values are crosses on the line of the target, in the color of their curve."""
    target = found.target()
    for setup in figure.setups:
        events = found.curve(setup)
        line = "--" if setup.mode == SPARSE_OVERLAP else "-"  # which is often equal to the one without overlap
        times, values = [event["seconds"] / 60 for event in events], [event["cross-entropy"] for event in events]
        (drawn,) = axes.plot(times, values, line, label=_shown(setup))
        if setup in figure.marks:
            other, times_faster = figure.marks[setup]
            axes.plot([found.time_to(other, target) / 60 / times_faster], [target], "x", color=drawn.get_color())
    axes.axhline(target, color="black", linewidth=0.8)
    axes.set_xlabel("simulated time (minutes); the line is the target")
    axes.set_ylabel("validation cross-entropy per word (nats)")
    axes.set_ylim(top=6)
    axes.legend(frameon=False)
