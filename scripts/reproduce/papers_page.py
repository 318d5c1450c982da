"""The reproduction of five papers as a page: a table of their claims, and a picture for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nmt_train.report.figure import mark, new_figure, save_figure
from reproduce import papers, papers_claims, papers_compared, papers_peers, papers_servers, pipe_sgd_equations
from reproduce.claims import judged, tally, verdict
from reproduce.papers import BATCHES, BUNDLES, CODECS, LOSSES, SPEEDS, TAUS, WIDTHS, WORKERS
from reproduce.runs import CURVES, MEASURES, Missing, Runs, Setup
from reproduce.seeded import SeededRuns

_ABOUT = """# Claims of five papers, tried on simulated clusters

**Of {claims} claims of five papers, {tally}.**

All is simulated (s), on clusters and with model sizes like the papers'. Values without a range are of one run (1),
unless said. `scripts/reproduce/papers` makes this page from systems/{curves} and systems/{measures}.

{findings}## Limits

- A small transformer on Multi30k stands for images, speech and large models; 2M words are four epochs. Read "does not
  hold" as "not early in the training of a small model".
- Adam with clipped gradients, except in `downpour`; only A1's rates were tuned, beta1 and warm-ups nowhere. Tune a
  method before you reject it ([comparison.md](comparison.md)).
- Single runs scatter. Trust verdicts, which three seeds decide near a limit; values within 10% may be equal.
- Costs and bandwidths that papers do not give were guessed (S1: 700 Mbit/s). See configs/clusters/pipesgd.yml,
  strom.yml, downpour.yml, arnold.yml.
- Some rules of verdicts changed when results were known. The [archive](archive/systems-protocol.md) says which, with
  all values, reasons and objections.

## Verdicts

Cross-entropies are those after equal words (F2: times), means of three seeds where these decide. A number holds within
10%, a range as it stands, quality within 2%.

"""


# Of the runs in docs/systems; left out while runs are missing.
_FINDINGS = """\
**Pipe-SGD** (Li et al. 2018). Wider pipelines than two steps learn less and are no faster, as the paper says. But width
2 learns less than `sync`, even if its first updates are those of `sync`. The speedups depend on the time of a batch, which the
paper does not give: 0.27 s was added to make both ranges hold, so P1 is *fitted*. P2 compares the simulator with the
paper's equations, not with machines.

**Strom 2015.** Words/s grow more with nodes than in the paper: simulated nodes have constant speed, and load no data
over the network. Whatever the threshold, five nodes learn less per word than one. One node first (the paper's recipe),
or own updates applied at once, narrow the gap. [Tuned](comparison.md), four machines need 1.4 times the words of one.

**Farrell and Yang 2016.** More workers process more words/s, and need as many more words. A warm-up, which the paper
does not have, makes eight and sixteen workers faster, and two slower (table below). F2 compares at equal times: a quarter
of the time that eight take, and all of it.

**Zhang et al. 2016, in Arnold's survey.** Where workers are equally fast, all gradients are about as stale, so dividing
by staleness is just another learning rate. With a slow worker it gains 0.3%, less than the 2% that count. Softsync does
not approach `sync`, since workers never wait.

**Noel and Osindero 2014, as the thesis cites them (2.3.4).** Losing 10% of the gradients teaches more than sending them
again. Whether it beats losing none is open: the ranges overlap. It saves no time here, since workers compute while
messages are sent again.

"""
_MARKED = tuple(its for its in BATCHES if its != 0.24)  # it is too near to 0.27
_FEW = 6  # labels in a legend that fits into a figure


def write(found: SeededRuns, output: Path) -> None:
    """Draw the figures and write `output` (Markdown) from the CSV files of `found`; missing runs are reported on the page."""
    pictures = output.with_suffix("")
    claims = papers_claims.CLAIMS
    findings = _FINDINGS if all(judged(claim, found)[1] for claim in claims) else ""
    about = _ABOUT.format(claims=len(claims), tally=tally(claims, found), curves=CURVES, measures=MEASURES, findings=findings)
    lines = [about + "\n".join(_verdicts(found)), ""]
    with suppress(Missing):
        times = papers_servers.downpour_times(found)
        lines += ["F1, by workers, to two targets (1):", "", *times]
    for name, (title, draw) in PICTURES.items():
        try:
            figure, axes = new_figure(width=6.5, height=4)
            draw(found, axes)
        except Missing:
            continue
        save_figure(figure, pictures / f"{name}.png")
        lines += [title, "", f"![{name}]({pictures.name}/{name}.png)", ""]
    output.write_text("\n".join(lines), encoding="utf-8")


def _verdicts(found: SeededRuns) -> list[str]:
    """Lines of Markdown: a row for each claim."""
    lines = ["| row | paper | claim | here | verdict |", "|---|---|---|---|---|"]
    for claim in papers_claims.CLAIMS:
        text, clauses = judged(claim, found)
        lines.append(f"| {claim.id} | {claim.source} | {claim.says} | {text} | {verdict(clauses) if clauses else '-'} |")
    return lines


def _speedups(found: Runs, axes: Any) -> None:
    for name, values in papers_peers.speedups(found).items():
        axes.plot(BATCHES, values, marker="o", label=f"against {name}")
    for low, high, color in ((2.0, 3.2, "#4e79a7"), (4.0, 5.4, "#f28e2b")):
        axes.axhspan(low, high, color=color, alpha=0.15, label=f"the paper's {low} to {high}")
    _label(axes, "a batch's forward and backward (seconds)", "speedup of pipe")
    mark(axes, _MARKED)


def _efficiency(found: Runs, axes: Any) -> None:
    for codec, marker in zip(CODECS, "os", strict=True):
        its = papers.predicted(codec)
        places = [BATCHES[0] + (BATCHES[-1] - BATCHES[0]) * step / 100 for step in range(101)]
        predicted = [pipe_sgd_equations.scaling_efficiency(its.l_up, seconds, its.l_comm) for seconds in places]
        (line,) = axes.plot(places, predicted, label=f"{codec}, Eq. 5 and 7")
        simulated = papers_peers.efficiencies(found, codec)
        axes.plot(BATCHES, simulated, marker, color=line.get_color(), fillstyle="none", label=f"{codec}, simulated")
    _label(axes, "a batch's forward and backward (seconds)", "scaling efficiency of pipe")
    mark(axes, _MARKED)


def _nodes(found: Runs, axes: Any) -> None:
    speeds = papers_peers.relative_speeds(found)
    axes.plot(list(speeds), list(speeds.values()), marker="o", label="simulated")
    axes.plot(list(SPEEDS), list(SPEEDS.values()), marker="o", label="the paper")
    axes.plot([1, 80], [1, 80], color="#bbbbbb", label="linear")
    _label(axes, "nodes", "words/s of all nodes, relative to one")


def _thresholds(found: SeededRuns, axes: Any) -> None:
    pairs = papers_peers.compressions(found)
    axes.plot(*zip(*pairs.values(), strict=True), marker="o", label="five workers, by tau")
    for number, (tau, place) in enumerate(pairs.items()):
        above = (0, 8 if number % 2 else -14)  # in turn, so that neighbors do not overlap
        axes.annotate(f"{tau:g}", place, textcoords="offset points", xytext=above, ha="center", fontsize=8)
    axes.axhline(papers_compared.after_words(found, papers.STROM_ALONE), color="#bbbbbb", label="one node alone")
    axes.plot(*papers_peers.adapted(found), "s", label="five workers, tau adapted")
    _label(axes, "compression ratio (gradient size / message size)", "cross-entropy after equal words (nats)")
    axes.set_xscale("log")
    axes.margins(0.08, 0.08)


def _workers(found: SeededRuns, axes: Any) -> None:
    setups = {f"{its} worker{'s'[: its != 1]}": papers.downpour(its) for its in WORKERS}
    _curves(setups, "seconds", 3600, "hours", highest=5.5)(found, axes)
    axes.axhline(papers_servers.target(found), color="#bbbbbb", linewidth=1)
    mark(axes, (0.1, 0.3, 1, 3, 10))
    axes.set_xlim(left=0.1)


def _rules(found: SeededRuns, axes: Any) -> None:
    bundles = {f"softsync, n = {bundle}": papers.softsync(bundle) for bundle in BUNDLES}
    _curves({**papers_servers.best_rates(found), **bundles}, *_WORDS)(found, axes)


def _curves(
    setups: Mapping[str, Setup], clock: str, unit: float, label: str, highest: float | None = None
) -> Callable[[Runs, Any], None]:
    """highest: the upper end of the axis of cross-entropy."""

    def draw(found: Runs, axes: Any) -> None:
        for name, setup in setups.items():
            events = found.curve(setup)
            axes.plot([event[clock] / unit for event in events], [event["cross-entropy"] for event in events], label=name)
        axes.set_ylim(top=highest)
        _label(axes, label, "validation cross-entropy per word (nats)")

    return draw


def _label(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    beside = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}  # many labels would cover curves
    axes.legend(frameon=False, **(beside if len(axes.lines) > _FEW else {}))


_WORDS = ("words", 1e6, "target words of all workers (millions)")
_WIDTHS = {"sync": papers.SYNC, **{f"width {width}": papers.of_width(width) for width in WIDTHS},
           **{f"{codec}, sync first": setup for codec, setup in papers.WARMED.items()}}  # fmt: skip
_TAUS = {
    "one node": papers.STROM_ALONE,
    "1/846 of the elements": papers.strom_coding("words"),
    **{f"tau {tau:g}": papers.strom_tau(tau) for tau in TAUS},
}
_LOSSES = {**{f"{share:.0%} lost": papers.losing(share) for share in LOSSES}, "10% sent again": papers.SENT_AGAIN}
PICTURES: dict[str, tuple[str, Callable[[SeededRuns, Any], None]]] = {
    "p1": ("P1: speedup of pipe, with its faster codec.", _speedups),
    "p2": ("P2: scaling efficiency of four workers in a pipeline.", _efficiency),
    "p3": ("P3 and P4: pipe by width, truncated if not said; *sync first*: width 2 after 100 updates of sync.",
           _curves(_WIDTHS, *_WORDS, highest=7.0)),
    "s1": ("S1: words per second of all nodes.", _nodes),
    "s2": ("S2: cross-entropy by compression ratio and tau.", _thresholds),
    "s2-curves": ("S1 and S2: five workers by threshold, and one node alone.", _curves(_TAUS, *_WORDS)),
    "f1": ("F1 and F2: downpour with AdaGrad; gray: the target of F1.", _workers),
    "a1": ("A1 and A2: eight workers; three rules with their best rates, and softsync.", _rules),
    "n1": ("N1: four workers in mode overlap, by the share of gradients that is lost.",
           _curves(_LOSSES, "seconds", 1, "virtual seconds", highest=6.0)),
}  # fmt: skip
