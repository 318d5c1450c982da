"""The reproduction of four papers as a page: a table of their claims, a picture for each, and the league of all modes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nmt_train.common.errors import UserError
from nmt_train.report.figure import mark, new_figure, save_figure
from reproduce import league, papers, papers_claims
from reproduce.claims import table
from reproduce.papers import BATCHES, BUNDLES, CODECS, SPEEDS, TAUS, WIDTHS, WORKERS
from reproduce.runs import Runs, Setup, points

_ABOUT = """\
`{command}` runs experiments of four papers and writes this page, which is for researchers: Pipe-SGD
(Li et al. 2018), Strom 2015, Farrell and Yang 2016, and Arnold 2016. The simulated clusters resemble those of the papers
(configs/clusters/pipesgd.yml, strom.yml, downpour.yml, arnold.yml), and the simulated time is that of models as large as the
papers'. The papers classify images and speech; here, a transformer with 2 + 2 layers is trained on Multi30k
(configs/papers-virtual.yml: batches of 32 sentences per worker, 2 million target words). *Holds in part* means that the order
agrees with the paper but the size does not. The claim of Farrell and Yang that training continues when the server dies is not
tested here. Every validation of every run is in {curves}.
"""
_LEAGUE = """\
## All modes on four machines

These tables are for users who choose a mode. The cluster has four machines with a GPU of about 8 TFLOP/s each. The trained
model is the one described above; the simulated time is that of the preset base with 60M parameters
(configs/clusters/league.yml). Every mode trains on 2 million words, in batches of 32 sentences per worker that are charged as
320.

- The *target* is cross-entropy {target:.3f}, the final value of the baseline *sync, bf16, 4 batches an update*, which sums
  gradients in bf16 every four batches. Of its two seeds, the target is the higher value.
- Cross-entropy and BLEU at the end have one value per finished seed; minutes are the mean over seeds.
- `sync`, `powersgd`, `pipe`, `local-sgd` and `diloco` compute the same parameters on every network. They were trained at
  1 Gbit/s only, and timed at all three bandwidths.
- BLEU is measured on test_2016_flickr with greedy search. It is low, because training lasts only four epochs.
- *Sent* is the number of bytes per word, relative to `sync`. A dash means fewer than 100 updates, whose bytes were not logged.
- If the log of a run lacks the data for a cell, the cell uses the other seed alone, or says *not known*.

The figure shows the modes that reach the target within these words.
"""


def write(folder: Path, output: Path, command: str) -> None:
    """Draw the figures and write `output` (Markdown) from the finished runs; missing runs are reported on the page."""
    found, pictures = Runs(folder), output.with_suffix("")
    pictures.mkdir(parents=True, exist_ok=True)
    points(folder / "training", pictures / "curves.csv")
    lines = ["# Experiments of four other papers on simulated clusters", ""]
    lines += [_ABOUT.format(command=command, curves=f"{pictures.name}/curves.csv")]
    lines += table(papers_claims.CLAIMS, found, "paper", "what it says")
    for name, (title, draw) in PICTURES.items():
        try:
            figure, axes = new_figure(width=6.5, height=4)
            draw(found, axes)
        except UserError:
            continue
        save_figure(figure, pictures / f"{name}.png")
        lines += [title, "", f"![{name}]({pictures.name}/{name}.png)", ""]
    try:
        lines += [_LEAGUE.format(target=league.target(found)), *league.table(found)]
        lines += [f"![league]({league.draw(found, pictures / 'league.png').relative_to(output.parent)})", ""]
    except (UserError, ValueError):
        lines += ["Not all runs of the league were made.", ""]
    output.write_text("\n".join(lines), encoding="utf-8")


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
        exchange = 1 / papers_claims.pace(found, papers.pipe(BATCHES[0], codec))
        own = [1 / papers_claims.pace(found, papers.alone(seconds)) for seconds in BATCHES]
        axes.plot(BATCHES, [time / max(time, exchange) for time in own], label=f"{codec}, Eq. 7")
    _label(axes, "a batch's forward and backward (seconds)", "scaling efficiency of pipe")
    mark(axes, BATCHES)


def _nodes(found: Runs, axes: Any) -> None:
    speeds = papers_claims.relative_speeds(found)
    axes.plot(list(speeds), list(speeds.values()), marker="o", label="simulated")
    axes.plot(list(SPEEDS), list(SPEEDS.values()), marker="o", label="the paper")
    axes.plot([1, 80], [1, 80], color="#bbbbbb", label="linear")
    _label(axes, "nodes", "times as many words/s as one")


def _thresholds(found: Runs, axes: Any) -> None:
    pairs = papers_claims.compressions(found)
    axes.plot(*zip(*pairs.values(), strict=True), marker="o")
    for tau, place in pairs.items():
        axes.annotate(f"tau {tau:g}", place, textcoords="offset points", xytext=(4, 6), fontsize=8)
    _label(axes, "compression ratio (gradient size / message size)", "cross-entropy after equal words (nats)", legend=False)
    axes.set_xscale("log")


def _curves(setups: Mapping[str, Setup], clock: str, unit: float, label: str) -> Callable[[Runs, Any], None]:
    def draw(found: Runs, axes: Any) -> None:
        for name, setup in setups.items():
            events = found.validations(setup)
            axes.plot([event[clock] / unit for event in events], [event["cross-entropy"] for event in events], label=name)
        _label(axes, label, "validation cross-entropy per word (nats)")

    return draw


def _label(axes: Any, x: str, y: str, legend: bool = True) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if legend:
        axes.legend(frameon=False)


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
PICTURES: dict[str, tuple[str, Callable[[Runs, Any], None]]] = {
    "p1": ("P1: speedup of pipe, with the faster of half and int8.", _speedups),
    "p2": ("P2: scaling efficiency of four workers in a pipeline.", _efficiency),
    "p3": ("P3 and P4: pipe by width; the codec is half unless the label says int8.", _curves(_WIDTHS, *_WORDS)),
    "s1": ("S1: words per second of all nodes.", _nodes),
    "s2": ("S2: cross-entropy by compression ratio.", _thresholds),
    "s2-curves": ("S1 and S2: five workers by threshold, and one node alone.", _curves(_TAUS, *_WORDS)),
    "f1": ("F1 and F2: downpour with AdaGrad.",
           _curves({f"{workers} workers": papers.downpour(workers) for workers in WORKERS}, "seconds", 3600, "hours")),
    "a1": ("A1 and A2: eight workers.", _curves(_RULES, *_WORDS)),
}  # fmt: skip
