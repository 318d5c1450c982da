"""The reproduction of the thesis as a page: its figures 4.1 to 4.19 in its own style, and a table of its claims."""

from __future__ import annotations

import itertools
from pathlib import Path

from nmt_train.common.errors import UserError
from nmt_train.report import convergence, timeline
from nmt_train.report.figure import new_figure, save_figure
from reproduce.claims import table
from reproduce.runs import Setup, points
from reproduce.thesis import BOUND, GOALS, REMOTE, THOUSANDTH, Results
from reproduce.thesis_claims import CLAIMS

TIMELINES = {
    "4.1": Setup("single", "1x1"), "4.2": Setup("single", "1x4"), "4.4": Setup("vanilla", "2x1"),
    "4.7": Setup("overlap", "2x1"), "4.11": Setup("sparse", "2x1", REMOTE), "4.15": Setup("sparse-overlap", "2x1"),
}  # fmt: skip
_ONE_NODE = [("single", f"1x{devices}") for devices in (1, 2, 4, 8)]


def _per_node(mode: str) -> list[tuple[str, str]]:
    return [(mode, f"4x{devices}") for devices in (1, 2, 3, 4)]


def _nodes(mode: str) -> list[tuple[str, str]]:
    return [("single", "1x2"), *((mode, f"{nodes}x2") for nodes in (2, 3, 4, 5))]


# Per figure: the bars, their height (words/s of one node or of all nodes), and the label of the horizontal axis.
BARS = {
    "4.3a": (_ONE_NODE, "all", "devices of one machine"),
    **{figure: (_per_node(mode), "node", "devices per machine, 4 machines")
       for figure, mode in {"4.5a": "vanilla", "4.8a": "overlap", "4.12a": "sparse", "4.16a": "sparse-overlap"}.items()},
    **{figure: (_nodes(mode), "all", "machines of two devices")
       for figure, mode in {"4.5b": "vanilla", "4.8b": "overlap", "4.12b": "sparse", "4.16b": "sparse-overlap"}.items()},
}  # fmt: skip
_BASE = Setup("single", "1x1")
CURVES = {
    "4.3b": [Setup(*its) for its in _ONE_NODE],
    "4.6": [_BASE, *(Setup("vanilla", name) for name in ("2x1", "2x2", "4x1", "4x2"))],
    "4.9": [_BASE, *(Setup("overlap", name) for name in ("2x1", "2x2", "4x1"))],
    "4.10": [Setup("overlap", name, options) for name in ("2x1", "2x2") for options in ((), BOUND)],
    "4.13": [_BASE, Setup("single", "1x4"), *(Setup("sparse", name) for name in ("2x1", "3x1", "4x1"))],
    "4.14": [Setup("single", "1x2"), Setup("single", "1x8"), *(Setup("sparse", name) for name in ("2x2", "3x2", "4x2"))],
    "4.17": [Setup(mode, name) for name in ("3x1", "4x1") for mode in ("sparse", "sparse-overlap")],
    "4.18": [Setup(mode, name) for name in ("3x2", "4x2") for mode in ("sparse", "sparse-overlap")],
    "4.19": [_BASE, Setup("single", "1x4"), *(Setup("sparse-overlap", name) for name in ("3x1", "4x2", "7x1"))],
}


_ABOUT = """\
`{command}` runs the experiments of the thesis (Neckermann 2017) and writes this page, which is for researchers.
*NxM* is a cluster of N machines with M devices each. Every run trains the preset tiny with 2 + 2 layers on Multi30k, with 64
sentences per batch and worker. The simulated time is that of K40 GPUs, a network of 375 MB/s and 110.7M parameters
(configs/clusters/thesis-*.yml). *2x as fast as 1x1* means that a run reaches validation cross-entropy {target:.3f}, the final
value of 1x1, in half the time. *Holds in part* means that the order agrees with the thesis but the size does not. Two figures
of the thesis were used to fit the clusters, so they are not findings: eight devices of one machine process 4.3 times as many
words/s as one (T1: the bus), and a machine of vanilla 4x1 processes a third of the words/s of 1x1 (T5: the time of a batch).
Every validation of every run is in {curves}."""


def write(folder: Path, target: float, output: Path, command: str) -> None:
    """Draw the figures and write `output` (Markdown) from the finished runs; missing runs are reported on the page."""
    found, pictures = Results(folder, target), output.with_suffix("")
    drawn: dict[str, Path] = {}
    for figure, setup in TIMELINES.items():
        drawn[figure] = timeline.plot(folder / "timing" / setup.name, None, None, pictures / f"figure-{figure}.png")[0]
    for figure, (bars, what, label) in BARS.items():
        drawn[figure] = _draw_bars(found, bars, what, label, pictures / f"figure-{figure}.png")
    for figure, setups in CURVES.items():
        runs = [folder / "training" / setup.name for setup in setups]
        if all((run / "finished").exists() for run in runs):
            drawn[figure], table_ = convergence.plot(runs, "cross-entropy", "seconds", pictures / f"figure-{figure}.png")
            table_.unlink()  # curves.csv has its points
    points(folder / "training", pictures / "curves.csv")
    head, claims = _head(found, command, f"{pictures.name}/curves.csv"), table(CLAIMS, found, "figure", "the thesis")
    output.write_text("\n".join([*head, *claims, *_goals(found), *_figures(drawn, output)]), encoding="utf-8")


def _head(found: Results, command: str, curves: str) -> list[str]:
    text = _ABOUT.format(command=command, target=found.target, curves=curves)
    return ["# The thesis's experiments on simulated clusters", "", text, ""]


def _goals(found: Results) -> list[str]:
    """The table of speedup over 1x1, and of cross-entropy after the same words."""
    words = found.validations(Setup("single", "1x1"))[-1]["words"]
    lines = [
        "| setup | dropped | speedup over 1x1 | the thesis | cross-entropy after the same words, relative to 1x1 |",
        "|---|---|---|---|---|",
    ]
    for (goal, times), options in itertools.product(GOALS.items(), ((), THOUSANDTH)):
        try:
            setup = Setup(goal.mode, goal.cluster, options)
            worse = found.after(setup, words) / found.target - 1
            share = "99.9%" if options else "99%"
            faster = found.faster(goal.mode, goal.cluster, *options)
            gain = f"{faster:.2f}x" if faster else f"not reached in {found.validations(setup)[-1]['seconds']:,.0f} s"
            lines.append(f"| {goal.mode} {goal.cluster} | {share} | {gain} | {times}x | {worse:+.1%} |")
        except UserError:
            continue
    return [*lines, ""]


def _figures(drawn: dict[str, Path], output: Path) -> list[str]:
    lines: list[str] = []
    for figure in sorted(drawn, key=lambda name: (int(name[2:].rstrip("ab")), name)):
        lines += [f"Figure {figure}", "", f"![figure {figure}]({drawn[figure].relative_to(output.parent)})", ""]
    return lines


def _draw_bars(found: Results, bars: list[tuple[str, str]], what: str, label: str, output: Path) -> Path:
    figure, axes = new_figure(width=5, height=3.6)
    heights = [found.speed(*bar) if what == "all" else found.per_node(*bar) for bar in bars]
    names = [cluster.split("x")[label.startswith("devices")] for _, cluster in bars]
    axes.bar(names, heights, color="#4e79a7", width=0.6)
    for place, height in enumerate(heights):
        axes.text(place, height, f"{height:,.0f}", ha="center", va="bottom", fontsize=8)
    axes.set_xlabel(label)
    axes.set_ylabel("words/s, all machines" if what == "all" else "words/s of each machine")
    axes.grid(axis="x", visible=False)
    save_figure(figure, output)
    return output
