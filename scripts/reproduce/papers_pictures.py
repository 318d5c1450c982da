"""The pictures of the papers' experiments, from the CSV files of their runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from nmt_train.report.figure import (
    BLUE,
    CONTEXT,
    GREEN,
    INK,
    ORANGE,
    PALE,
    label_ends,
    log_ticks,
    look,
    new_figure,
    save_figure,
)
from reproduce import papers, papers_compared, papers_peers, papers_servers, pipe_sgd_equations
from reproduce.papers import BATCHES, BUNDLES, CODECS, LOSSES, SPEEDS, TAUS, WIDTHS, WORKERS
from reproduce.runs import Missing, Setup
from reproduce.seeded import SEEDS, SeededRuns

_WORDS = ("words", 1e6, "target words of all workers (millions)")
_ENTROPY = "validation cross-entropy per word (nats)"
_UNTRAINED = 8.99  # nats: the logarithm of the 8,000 words of the vocabulary
_WIDTHS = {"sync": papers.SYNC, **{f"width {width}": papers.of_width(width) for width in WIDTHS},
           **{f"{codec}, sync first": setup for codec, setup in papers.WARMED.items()}}  # fmt: skip
_TAUS = {
    "one node": papers.STROM_ALONE, "1/846 of the elements": papers.strom_coding("words"),
    **{f"tau {tau:g}": papers.strom_tau(tau) for tau in TAUS},
}  # fmt: skip
_LOSSES = {**{f"{share:.0%} lost": papers.losing(share) for share in LOSSES}, "10% sent again": papers.SENT_AGAIN}
_DOWNPOUR = {f"{its} worker{'s'[: its != 1]}": papers.downpour(its) for its in WORKERS}


def draw(found: SeededRuns, name: str, pictures: Path) -> bool:
    """Draw one of PICTURES into the folder `pictures`; False if a run was not made."""
    try:
        save_figure(PICTURES[name][1](found), pictures / f"{name}.svg")
    except Missing:
        return False
    return True


def _speedups(found: SeededRuns) -> Any:
    values, names = papers_peers.speedups(found), {}
    ranges = (f"{min(its):.1f} to {max(its):.1f} times as fast as {name}" for name, its in values.items())
    figure, axes = new_figure(7, 4, f"pipe is {', '.join(ranges)}")
    for (name, its), (low, high), color in zip(values.items(), ((2.0, 3.2), (4.0, 5.4)), (BLUE, ORANGE), strict=True):
        (line,) = axes.plot(BATCHES, its, marker="o", color=color)
        names[line] = f"against {name}"
        axes.axhspan(low, high, color=color, alpha=0.12, linewidth=0)
        axes.annotate(
            f"the paper: {low} to {high}", (1, high), (-4, -4), axes.get_yaxis_transform(), "offset points",
            va="top", ha="right", fontsize=9, color=color,
        )  # fmt: skip
    _batch_axis(axes, "speedup of pipe")
    label_ends(axes, names)
    return figure


def _batch_axis(axes: Any, beside: str) -> None:
    log_ticks(axes, "x", BATCHES)
    for label, seconds in zip(axes.get_xticklabels(), BATCHES, strict=True):
        label.set_ha({0.24: "right", 0.27: "left"}.get(seconds, "center"))
    axes.set_xlabel("forward and backward passes of a batch (seconds)")
    axes.set_ylabel(beside)


def _efficiency(found: SeededRuns) -> Any:
    figure, axes = new_figure(7, 4, "Scaling efficiency of pipe: simulated (circles) and by the paper's equations 5 and 7")
    names = {}
    for codec, color in zip(CODECS, (BLUE, ORANGE), strict=True):
        its = papers.predicted(codec)
        places = [BATCHES[0] + (BATCHES[-1] - BATCHES[0]) * step / 100 for step in range(101)]
        predicted = [pipe_sgd_equations.scaling_efficiency(its.l_up, seconds, its.l_comm) for seconds in places]
        (line,) = axes.plot(places, predicted, color=color)
        names[line] = codec
        axes.plot(BATCHES, papers_peers.efficiencies(found, codec), "o", color=color, fillstyle="none")
    _batch_axis(axes, "scaling efficiency of pipe")
    label_ends(axes, names)
    return figure


def _nodes(found: SeededRuns) -> Any:
    speeds = papers_peers.relative_speeds(found)
    most = max(speeds)
    figure, axes = new_figure(
        7, 4, f"{most} nodes have {speeds[most]:.0f} times the words/s of one; the paper says {SPEEDS[most]:.0f}"
    )
    names = {}
    for name, its, style in (
        ("linear", {1: 1.0, most: float(most)}, {"color": CONTEXT, "linewidth": 1}),
        ("the paper", SPEEDS, {"color": INK, "marker": "o", "linestyle": (0, (5, 2))}),
        ("simulated", speeds, {"color": BLUE, "marker": "o"}),
    ):
        (line,) = axes.plot(list(its), list(its.values()), **style)
        names[line] = name
    axes.set_xlabel("nodes")
    axes.set_ylabel("words/s of all nodes, relative to one")
    label_ends(axes, names)
    return figure


def _thresholds(found: SeededRuns) -> Any:
    pairs = papers_peers.compressions(found)
    figure, axes = new_figure(7, 4, "strom: the more a message is compressed, the less is learned from equal words")
    (line,) = axes.plot(*zip(*pairs.values(), strict=True), marker="o", color=BLUE)
    for number, (tau, place) in enumerate(pairs.items()):
        above = (0, 8 if number % 2 else -14)  # in turn, so that neighbors do not overlap
        axes.annotate(f"{tau:g}", place, textcoords="offset points", xytext=above, ha="center", fontsize=9, color=BLUE)
    alone = axes.axhline(papers_compared.after_words(found, papers.STROM_ALONE), color=CONTEXT)
    adapted = papers_peers.adapted(found)
    axes.plot(*adapted, "s", color=ORANGE)
    axes.annotate("tau adapted", adapted, (8, -4), textcoords="offset points", fontsize=9, color=ORANGE)
    axes.set_xlabel("compression ratio (gradient size / message size)")
    axes.set_ylabel("cross-entropy after equal words (nats)")
    axes.set_xscale("log")
    axes.margins(0.08, 0.08)
    label_ends(axes, {line: "five workers,\nby tau", alone: "one node"})
    return figure


def _curves(
    found: SeededRuns, setups: Mapping[str, Setup], colors: Mapping[str, str], title: str, clock: str, unit: float, label: str,
    highest: float | None = None, places: tuple[float, ...] = (),
) -> Any:  # fmt: skip
    """Cross-entropy of each setup, a line for each seed with which it was trained; those without a color are gray.

    title: a sentence with the cross-entropies of setups after equal words, by name, as the page has them. highest: the upper
    end of the axis of cross-entropy. places: ticks of a logarithmic axis of time.
    """
    ends = {name.replace(" ", "_"): f"{papers_compared.after_words(found, setup):.2f}" for name, setup in setups.items()}
    figure, axes = new_figure(7, 4.2, title.format(**ends))
    names: dict[str, Any] = {}
    for name, setup in setups.items():
        color = colors.get(name, CONTEXT)
        for seed in SEEDS:
            its = setup.with_seed(seed)
            if found.trained(its):
                events = found.curve(its)
                (line,) = axes.plot(
                    [event[clock] / unit for event in events], [event["cross-entropy"] for event in events], color=color,
                    linewidth=1.6 if seed == SEEDS[0] else 0.8,
                )  # fmt: skip
                names.setdefault(name, line)
    axes.set_ylim(top=highest)
    if places:
        log_ticks(axes, "x", places)
        axes.set_xlim(left=places[0])
    else:
        axes.set_xlim(left=0)
    axes.set_xlabel(label)
    axes.set_ylabel(_ENTROPY)
    label_ends(axes, {line: name for name, line in names.items()})
    return figure


def _taus(found: SeededRuns) -> Any:
    colors = {"one node": INK, "1/846 of the elements": BLUE}
    title = "After 2M words: one node {one_node}; five workers that send 1/846 of the elements {1/846_of_the_elements}"
    figure = _curves(found, _TAUS, colors, title, *_WORDS, highest=9.4)
    (axes,) = figure.axes
    axes.annotate("as at the start", (0.02, _UNTRAINED), (0, 3), axes.get_yaxis_transform(), "offset points", fontsize=9)
    return figure


def _workers(found: SeededRuns) -> Any:
    target, (two, eight) = papers_servers.target(found), (papers.downpour(its) for its in (2, 8))
    shares = found.by_seed(
        lambda seed: found.time_to(eight.with_seed(seed), target) / found.time_to(two.with_seed(seed), target)
    )
    title = f"downpour: to the gray line, eight workers take {mean(shares):.2f} times as long as two"
    colors = {"2 workers": BLUE, "8 workers": ORANGE, "16 workers": GREEN}
    figure = _curves(
        found, _DOWNPOUR, colors, title, "seconds", 3600, "simulated time (hours)", 5.5, places=(0.1, 0.3, 1, 3, 10)
    )
    figure.axes[0].axhline(target, color=PALE, linewidth=2, zorder=0)
    return figure


def _rules(found: SeededRuns) -> Any:
    bundles = {f"softsync, n = {bundle}": papers.softsync(bundle) for bundle in BUNDLES}
    colors = {"sync": look("sync")["color"], "asynchronous": ORANGE, "staleness-aware": GREEN}
    title = "After 2M words: sync {sync}, asynchronous {asynchronous}, staleness-aware {staleness-aware}"
    return _curves(found, {**papers_servers.best_rates(found), **bundles}, colors, title, *_WORDS)


PICTURES: dict[str, tuple[str, Callable[[SeededRuns], Any]]] = {
    "p1": ("P1: speedup of pipe, with its faster codec.", _speedups),
    "p2": ("P2: scaling efficiency of four workers in a pipeline.", _efficiency),
    "p3": ("P3 and P4: pipe by width, truncated if not said; *sync first*: width 2 after 100 updates of sync.",
           partial(_curves, setups=_WIDTHS, colors={"sync": look("sync")["color"], "width 2": ORANGE},
                   title="After 2M words: sync {sync}, pipe of width 2 {width_2}, of width 9 {width_9}",
                   clock=_WORDS[0], unit=_WORDS[1], label=_WORDS[2], highest=7.0)),
    "s1": ("S1: words per second of all nodes.", _nodes),
    "s2": ("S2: cross-entropy by compression ratio and tau.", _thresholds),
    "s2-curves": ("S1 and S2: five workers by threshold, and one node alone.", _taus),
    "f1": ("F1 and F2: downpour with AdaGrad; gray: the target of F1.", _workers),
    "a1": ("A1 and A2: eight workers; three rules with their best rates, and softsync.", _rules),
    "n1": ("N1: four workers in mode overlap, by the share of gradients that is lost.",
           partial(_curves, setups=_LOSSES, colors={"0% lost": INK, "10% lost": ORANGE, "10% sent again": BLUE},
                   title="After 2M words: a tenth of the gradients lost {10%_lost}, none lost {0%_lost}",
                   clock="seconds", unit=1.0, label="simulated time (seconds)", highest=6.0)),
}  # fmt: skip
