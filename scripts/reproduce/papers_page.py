"""The reproduction of four papers as a page: a table of their claims, and a picture for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nmt_train.report.figure import mark, new_figure, save_figure
from nmt_train.simulation import equations
from reproduce import papers, papers_claims
from reproduce.claims import table
from reproduce.papers import BATCHES, BUNDLES, CODECS, SPEEDS, TAUS, WIDTHS, WORKERS
from reproduce.runs import CURVES, MEASURES, Missing, Runs, Setup
from reproduce.seeded import SeededRuns

_ABOUT = """# Experiments of four other papers on simulated clusters

This page is for researchers. `scripts/reproduce/papers` made it from systems/{curves} (every validation of every run) and
systems/{measures}; it repeats experiments of four papers: Pipe-SGD (Li et al. 2018), Strom 2015, Farrell and Yang 2016, and
Arnold 2016. The simulated clusters resemble those of the papers (configs/clusters/pipesgd.yml, strom.yml, downpour.yml,
arnold.yml), and the simulated time is that of models as large as the papers'. The papers classify images and speech; here, a
transformer with 2 + 2 layers is trained on Multi30k (configs/papers-virtual.yml: batches of 32 sentences per worker, 2
million target words).

A claim consists of clauses; the limits of each were set in scripts/reproduce/papers_claims.py before the runs: a number is
confirmed within 10%, and a quality is the same within 2% of the cross-entropy. Where a cross-entropy is within 3% of a limit,
or of the one that it is compared with, or a time within 10%, three seeds decide; if they disagree, the clause is inconclusive.
On 24 November 2026, before these runs, a critical reading corrected the judges of P3, S2, F1, F2, A1 and A2. The claim of
Farrell and Yang that training continues when the server dies is not tested here, but in tests/training. All modes are compared
in [comparison.md](comparison.md).
"""

_NOT_REPEATED = """## What is not repeated

- *Messages that are lost* (Noel and Osindero 2014, in section 2.3.4 of the thesis). Here, a worker waits for the answer to each
  push, and a delta of parameters presupposes that the worker has received the ones before. `loss` in a cluster file simulates
  messages that are sent again.
- *Double buffering* (Seide et al. 2014): the gradients of half a batch are sent while the other half is computed. This is mode
  `pipe`, where `pipeline.width` is 2, with batches of half the size.
- *The parameter server of Pipe-SGD on a fifth machine.* Here, machines that hold shards also train.
- *A fixed overall batch* (Arnold 2016, section 3.4.4). n workers in mode `sync`, each with an nth of the batch, make the same
  updates as one worker (a test says so), and only words/s differ.
- *Conjugate gradients* (Arnold 2016, section 2.2.3): their directions and step lengths presuppose that successive gradients are
  of the same function, which gradients of small batches are not.
"""


_FEW = 7  # labels in a legend that fits into a figure


def write(found: SeededRuns, output: Path) -> None:
    """Draw the figures and write `output` (Markdown) from the CSV files of `found`; missing runs are reported on the page."""
    pictures = output.with_suffix("")
    lines = [_ABOUT.format(curves=CURVES, measures=MEASURES), *table(papers_claims.CLAIMS, found, "paper", "what it says")]
    for name, (title, draw) in PICTURES.items():
        try:
            figure, axes = new_figure(width=6.5, height=4)
            draw(found, axes)
        except Missing:
            continue
        save_figure(figure, pictures / f"{name}.png")
        lines += [title, "", f"![{name}]({pictures.name}/{name}.png)", ""]
    output.write_text("\n".join([*lines, _NOT_REPEATED]), encoding="utf-8")


def _speedups(found: Runs, axes: Any) -> None:
    for name, values in papers_claims.speedups(found).items():
        axes.plot(BATCHES, values, marker="o", label=f"against {name}")
    for low, high, color in ((2.0, 3.2, "#4e79a7"), (4.0, 5.4, "#f28e2b")):
        axes.axhspan(low, high, color=color, alpha=0.15, label=f"the paper's {low} to {high}")
    _label(axes, "a batch's forward and backward (seconds)", "speedup of pipe")
    mark(axes, BATCHES)


def _efficiency(found: Runs, axes: Any) -> None:
    for codec in CODECS:
        axes.plot(BATCHES, papers_claims.efficiencies(found, codec), marker="o", linestyle="", label=f"{codec}, simulated")
        its = papers.predicted(codec)
        predicted = [equations.scaling_efficiency(its.l_up, seconds, its.l_comm) for seconds in BATCHES]
        axes.plot(BATCHES, predicted, label=f"{codec}, Eq. 5 and 7")
    _label(axes, "a batch's forward and backward (seconds)", "scaling efficiency of pipe")
    mark(axes, BATCHES)


def _nodes(found: Runs, axes: Any) -> None:
    speeds = papers_claims.relative_speeds(found)
    axes.plot(list(speeds), list(speeds.values()), marker="o", label="simulated")
    axes.plot(list(SPEEDS), list(SPEEDS.values()), marker="o", label="the paper")
    axes.plot([1, 80], [1, 80], color="#bbbbbb", label="linear")
    _label(axes, "nodes", "times as many words/s as one")


def _thresholds(found: SeededRuns, axes: Any) -> None:
    pairs = papers_claims.compressions(found)
    axes.plot(*zip(*pairs.values(), strict=True), marker="o", label="five workers, by tau")
    for number, (tau, place) in enumerate(pairs.items()):
        above = (0, 8 if number % 2 else -14)  # in turn, so that neighbors do not overlap
        axes.annotate(f"{tau:g}", place, textcoords="offset points", xytext=above, ha="center", fontsize=8)
    axes.axhline(papers_claims.after_words(found, papers.STROM_ALONE), color="#bbbbbb", label="one node alone")
    _label(axes, "compression ratio (gradient size / message size)", "cross-entropy after equal words (nats)")
    axes.set_xscale("log")
    axes.margins(x=0.08)


def _curves(setups: Mapping[str, Setup], clock: str, unit: float, label: str) -> Callable[[Runs, Any], None]:
    def draw(found: Runs, axes: Any) -> None:
        for name, setup in setups.items():
            events = found.curve(setup)
            axes.plot([event[clock] / unit for event in events], [event["cross-entropy"] for event in events], label=name)
        _label(axes, label, "validation cross-entropy per word (nats)")

    return draw


def _label(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    beside = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}  # many labels would cover curves
    axes.legend(frameon=False, **(beside if len(axes.lines) > _FEW else {}))


_WORDS = ("words", 1e6, "target words of all workers (millions)")
_WIDTHS = {"sync": papers.SYNC, **{f"width {width}": papers.of_width(width) for width in WIDTHS},
           **{f"{codec}, with warm-up": setup for codec, setup in papers.WARMED.items()}}  # fmt: skip
_TAUS = {
    "one node": papers.STROM_ALONE,
    "1/846 of the elements": papers.strom_coding("words"),
    **{f"tau {tau:g}": papers.strom_tau(tau) for tau in TAUS},
}
_RULES = {"sync": papers.TOGETHER, "asynchronous": papers.ASYNC, "staleness-aware": papers.AWARE,
          **{f"softsync, n = {bundle}": papers.softsync(bundle) for bundle in BUNDLES}}  # fmt: skip
PICTURES: dict[str, tuple[str, Callable[[SeededRuns, Any], None]]] = {
    "p1": ("P1: speedup of pipe, with the faster of truncated and int8.", _speedups),
    "p2": ("P2: scaling efficiency of four workers in a pipeline.", _efficiency),
    "p3": ("P3 and P4: pipe by width; the codec is truncated unless the label says int8.", _curves(_WIDTHS, *_WORDS)),
    "s1": ("S1: words per second of all nodes.", _nodes),
    "s2": ("S2: cross-entropy by compression ratio; the numbers are tau.", _thresholds),
    "s2-curves": ("S1 and S2: five workers by threshold, and one node alone.", _curves(_TAUS, *_WORDS)),
    "f1": ("F1 and F2: downpour with AdaGrad.",
           _curves({f"{its} worker{'s'[: its != 1]}": papers.downpour(its) for its in WORKERS}, "seconds", 3600, "hours")),
    "a1": ("A1 and A2: eight workers.", _curves(_RULES, *_WORDS)),
}  # fmt: skip
