"""The pictures of the comparison, from the validations of all trials: speedups, cross-entropy, BLEU."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean, median
from typing import Any

from nmt_train.report.figure import CONTEXT, INK, label_ends, log_ticks, look, new_figure, save_figure
from reproduce.places import FAST, FASTEST, JITTER, MACHINES, NETWORKS, PLACES, SLOW, SLOWEST, STRAGGLER, THESIS_4X2, THESIS_7X1
from reproduce.systems import ALONE, IDEAL, SYSTEMS, plan_of
from reproduce.trials import Trial, Trials

RIVALS = ("sync bf16", "powersgd", "local-sgd", "diloco", "strom")  # what other software offers
TITLES = {
    STRAGGLER: "a slow machine, 1 Gbit/s", JITTER: "jitter, 1 Gbit/s",
    THESIS_4X2: "the thesis's four machines of two devices", THESIS_7X1: "the thesis's seven machines",
    **{place: f"Tatoeba, {machines} machine{'s' * (machines > 1)}, 1 Gbit/s" for machines, place in MACHINES.items()},
}  # fmt: skip
# That an all-reduce in bf16 takes: it sends 3 bytes per parameter among four machines; 60M parameters, steps of 0.2 s.
STEPS = {FASTEST: 0.7, FAST: 7.0, SLOW: 70.0, SLOWEST: 700.0}
# README's table: the most steps per all-reduce, and the mode for them.
ADVICE = (
    (0.5, "sync"), (10.0, "low-bit"), (100.0, "sparse-local"), (2000.0, "sparse-local-\nasync"),
)  # fmt: skip
_TOP = 4.5  # cross-entropy at the upper end of the pictures of curves; the start is the same for all
_HOST_BYTES, _HOST_BATCH = 3 * 2.3e6, 2048  # of configs/multi30k-tiny.yml, with which docs/adviser.csv was measured


def page_name(place: str) -> str:
    """The name of the page of a place, and of its picture, without extension."""
    return f"results-{place.replace(' ', '').replace('/', '')}"


def style(system: str) -> dict[str, Any]:
    """Color and line of a system: those of its mode. Ideal sync and variants with settings of their own are dashed or gray."""
    if system == IDEAL:
        return {"color": INK, "linestyle": (0, (5, 2))}
    return look(SYSTEMS[system].mode if "%" not in system else "")


def complete(trials: Trials, place: str) -> dict[str, Trial]:
    """The best trial of each system whose tuning has come to runs as long as those of one machine."""
    alone = trials.tuned(ALONE, place)
    tuned = {system: trials.tuned(system, place) for system in SYSTEMS}
    return {system: trial for system, trial in tuned.items() if trial and alone and trial.words == alone.words}


def by_network(trials: Trials) -> dict[str, dict[str, list[float]]]:
    """The speedups of each system on each network, the fastest first; without one machine and ideal sync."""
    found = {}
    for network in (FASTEST, *NETWORKS):
        if len(trials.alone(network)) > 1:
            its = complete(trials, network).items()
            found[network] = {system: trials.speedups(trial) for system, trial in its if system not in (ALONE, IDEAL)}
    return {network: its for network, its in found.items() if its}


def redraw(trials: Trials) -> list[Path]:
    """Draw the pictures of the whole comparison, beside the pages that show them; returns their files."""
    folder = trials.path.parent
    drawn = [folder / "overview.svg", folder / "scaling.svg", folder / "bleu.svg", folder.parent / "which-mode.svg"]
    overview(trials, drawn[0])
    scaling(trials, drawn[1])
    bleu(trials, drawn[2])
    which_mode(trials, folder.parent / "adviser.csv", drawn[3])
    return drawn


def overview(trials: Trials, output: Path) -> None:
    """Draw how many times sooner than one machine each system learns the same model: a column per network, a row per system."""
    found = by_network(trials)
    best = {network: max(its, key=lambda system: mean(its[system])) for network, its in found.items()}
    rows = sorted(
        {system for its in found.values() for system in its},
        key=lambda system: [-mean(its.get(system, [0.0])) for its in sorted(found.values(), key=len, reverse=True)],
    )
    title = "Fastest of four simulated machines: " + "; ".join(
        f"{system.partition(',')[0]} at {' and '.join(group)}"
        for system, group in ((key, list(its)) for key, its in itertools.groupby(best, key=lambda network: best[network]))
    )
    figure, _ = new_figure(9, 1.7 + 0.25 * len(rows), title, columns=len(found))
    ideal = trials.tuned(IDEAL, FAST)
    for axes, (network, its) in zip(figure.axes, found.items(), strict=True):
        for place, system in enumerate(rows):
            _bar(axes, place, system, its.get(system))
        axes.axvline(1, color=INK, linewidth=0.8)
        if ideal is not None:
            axes.axvline(mean(trials.speedups(ideal)), color=CONTEXT, linewidth=0.8, linestyle=":")
        axes.set_title(f"{network}\n{STEPS[network]:g} steps per all-reduce", fontsize=9, loc="left")
        axes.set(xlim=(0, 4), xticks=(0, 1, 2, 3), ylim=(len(rows) - 0.5, -0.5))
        axes.grid(axis="y", visible=False)
        axes.tick_params("y", length=0)
    figure.axes[0].set_yticks(range(len(rows)), rows)
    for text, system in zip(figure.axes[0].get_yticklabels(), rows, strict=True):
        text.set_color(style(system)["color"])
    figure.supxlabel(
        "speedup over one machine (simulated). Hatched: methods of others. Pale: one run; else the mean and range of three.\n"
        "Dotted: all-reduce on a network without limits.", fontsize=9,
    )  # fmt: skip
    save_figure(figure, output)


def _bar(axes: Any, place: int, system: str, values: list[float] | None) -> None:
    if not values:
        axes.text(0.08, place, "not run", va="center", fontsize=8, color=CONTEXT, style="italic")
        return
    several, color = len(values) > 1, style(system)["color"]
    axes.barh(
        place, mean(values), height=0.72, color=color, alpha=1 if several else 0.45, edgecolor="white", linewidth=0,
        hatch="///" if system in RIVALS else "",
    )  # fmt: skip
    if several:
        axes.hlines(place, min(values), max(values), color=INK, linewidth=1)
    axes.text(max(values) + 0.16, place, f"{mean(values):.1f}", va="center", fontsize=8.5, color=INK)


def scaling(trials: Trials, output: Path) -> None:
    """Draw how many times sooner each system learns the same model with 2 to 16 machines, in runs as long as one machine's."""
    by_system: dict[str, dict[int, Trial]] = {}
    of = {machines: complete(trials, place) for machines, place in MACHINES.items()}
    for system, machines in itertools.product(SYSTEMS, MACHINES):
        if system != ALONE and (tuned := of[machines].get(system)):
            by_system.setdefault(system, {})[machines] = tuned
    if not by_system:
        return
    most = max(itertools.chain(*by_system.values()))
    figure, axes = new_figure(7, 4.4, "Each further machine gains less (simulated, 1 Gbit/s)")
    names = {}
    (linear,) = axes.plot([1, most], [1, most], color=CONTEXT, linewidth=1)
    names[linear] = "linear"
    for system, found in by_system.items():
        values = {machines: trials.speedups(tuned) for machines, tuned in found.items()}
        points = {1: 1.0} if len(found) > 1 else {}  # no line through a single point
        points |= {machines: mean(its) for machines, its in values.items()}
        (line,) = axes.plot([*points], [*points.values()], marker="o", markersize=5, **style(system))
        names[line] = system
        axes.vlines(
            [*values], [*map(min, values.values())], [*map(max, values.values())], color=line.get_color(), linewidth=0.8
        )
        for machines, tuned in found.items():
            batch = plan_of(tuned.settings).get("batch.tokens", f"{PLACES[tuned.place].tokens}")
            text = f"{points[machines]:.1f}x\nbatch {batch}"
            below = (7, -4) if machines < most else (-7, -8)
            aside = {"ha": "left" if machines < most else "right", "va": "top"}
            axes.annotate(text, (machines, points[machines]), below, textcoords="offset points", fontsize=8, **aside)
    log_ticks(axes, "x", [machines for machines in MACHINES if machines <= most])
    log_ticks(axes, "y", [machines for machines in MACHINES if machines <= most])
    axes.set(xlim=(0.95, 1.08 * most), ylim=(0.95, 1.08 * most))
    axes.set_xlabel("machines; batch: words of each machine")
    axes.set_ylabel("speedup over one machine")
    label_ends(axes, names)
    save_figure(figure, output)


def curves(trials: Trials, place: str, output: Path) -> None:
    """Draw cross-entropy against simulated time: one run of each system that has been tuned to the end.

    The time ends some time after the highlighted systems, so slower ones leave the picture at its edge.
    """
    tuned = complete(trials, place)
    shown = {system: trials.found[next(iter(trials.seeds(its)), its)] for system, its in tuned.items()}
    speeds = {system: mean(trials.speedups(its)) for system, its in tuned.items() if system not in (ALONE, IDEAL)}
    best = max(speeds, key=lambda system: speeds[system], default="")
    what = f"{best} is {speeds[best]:.1f} times as fast as one machine" if best else "one machine"
    figure, axes = new_figure(7.5, 4.8, f"{_title(place)}: {what}")
    names = {}
    for system, events in sorted(shown.items(), key=lambda item: style(item[0])["color"] != CONTEXT):
        (line,) = axes.plot(
            [event["seconds"] for event in events], [event["cross-entropy"] for event in events],
            linewidth=1.8 if style(system)["color"] != CONTEXT else 1.0, **style(system),
        )  # fmt: skip
        names[line] = system
    low = min(events[-1]["cross-entropy"] for events in shown.values())
    axes.set(xlim=(0, _end(shown)), ylim=(low - 0.1, _TOP))
    axes.set_xlabel("simulated time (seconds)")
    axes.set_ylabel("validation cross-entropy per word (nats)")
    label_ends(axes, names)
    save_figure(figure, output)


def _end(shown: Mapping[str, list[dict[str, Any]]]) -> float:
    """The time at which a picture ends: a fifth after highlighted systems that are much faster than one machine."""
    ends = {system: events[-1]["seconds"] for system, events in shown.items()}
    if ALONE not in shown:
        return float(1.05 * max(ends.values()))
    seen = next((event["seconds"] for event in shown[ALONE] if event["cross-entropy"] < _TOP - 0.5), ends[ALONE])
    highlighted = (system for system in shown if style(system)["color"] not in (INK, CONTEXT))
    quick = (ends[system] for system in highlighted if ends[system] < 0.6 * ends[ALONE])
    return float(min(1.05 * ends[ALONE], 1.25 * max([seen, *quick])))


def _title(place: str) -> str:
    title = TITLES.get(place, place)
    return title[0].upper() + title[1:]


def which_mode(trials: Trials, adviser: Path, output: Path) -> None:
    """Draw the speedups of the modes that README recommends against the steps that an all-reduce takes."""
    figure, axes = new_figure(8, 4.6, "The more steps an all-reduce takes, the less should be sent")
    names, hosts = {}, _on_hosts(adviser)
    found = by_network(trials)
    for system in ("low-bit", "sparse-local", "sparse-overlap", "sparse-local-async, tiles", "sync bf16"):
        points = {STEPS[network]: mean(its[system]) for network, its in found.items() if system in its}
        (line,) = axes.plot([*points], [*points.values()], marker="o", markersize=5, **style(system))
        mode = SYSTEMS[system].mode
        names[line] = mode
        measured = {steps: its[mode] for steps, its in hosts.items() if mode in its and mode != "sparse-local-async"}
        axes.plot([*measured], [*measured.values()], "o", markersize=6, fillstyle="none", color=line.get_color())
    log_ticks(axes, "x", (0.03, 0.1, 1, 10, 30, 100, 1000))
    axes.set(xlim=(0.03, ADVICE[-1][0]), ylim=(0, 4))
    axes.axhline(1, color=INK, linewidth=0.8)
    left = 0.03
    for right, mode in ADVICE:
        axes.axvline(right, color=CONTEXT, linewidth=0.8, linestyle=":")
        color = look(mode.replace("\n", ""))["color"]
        axes.text((left * right) ** 0.5, 3.95, mode, ha="center", va="top", fontsize=9, fontweight="bold", color=color)
        left = right
    axes.set_xlabel("steps that an all-reduce takes (filled: simulated; open: measured on virtual hosts)")
    axes.set_ylabel("speedup of four machines over one")
    label_ends(axes, names)
    save_figure(figure, output)


def _on_hosts(adviser: Path) -> dict[float, dict[str, float]]:
    """By the steps of an all-reduce: the speedup of each mode on four virtual hosts, as the median of its runs."""
    speeds: dict[str, dict[str, list[float]]] = {}
    for row in _rows(adviser):
        if row["case"].startswith("4 hosts"):
            speeds.setdefault(row["case"], {}).setdefault(row["mode"], []).append(float(row["measured"]) / float(row["needed"]))
    found = {}
    for case, its in speeds.items():
        alone = median(its.pop("single"))
        bandwidth = float(re.findall(r"(\d+)mbit", case)[0]) * 1e6 / 8
        found[_HOST_BYTES / bandwidth / (_HOST_BATCH / alone)] = {mode: median(values) / alone for mode, values in its.items()}
    return found


def bleu(trials: Trials, output: Path) -> None:
    """Draw BLEU against simulated time: one machine, and four of each system that bleu.csv has, beside the trials."""
    folder = trials.path.parent
    timed = trials.found | Trials(folder / "equal-time.csv").found
    points: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for row in _rows(folder / "bleu.csv"):
        trial = Trial(row["system"], row["place"], int(row["words"]), int(row["seed"]), tuple(row["settings"].split()))
        if trial in timed and trial.place == FAST and trial.settings == _shown_settings(trial.system, timed):
            its = (timed[trial][-1]["seconds"], float(row["BLEU on test_2016_flickr"]))
            points.setdefault(trial.system, {}).setdefault(trial.words, []).append(its)
    lines = {
        system: sorted((mean(s for s, _ in its), mean(b for _, b in its), its) for its in by_words.values())
        for system, by_words in points.items()
    }  # fmt: skip
    figure, axes = new_figure(7.5, 4.4, _bleu_title(lines))
    names = {}
    for system, means in lines.items():
        (line,) = axes.plot([s for s, _, _ in means], [b for _, b, _ in means], marker="o", markersize=5, **style(system))
        every = [point for _, _, runs in means for point in runs]
        axes.plot([s for s, _ in every], [b for _, b in every], ".", markersize=3, color=line.get_color())
        names[line] = f"{system}, four machines" if system != ALONE else system
    log_ticks(axes, "x", (200, 300, 500, 1000, 2000, 4000))
    axes.set_xlim(200, 4500)
    axes.set_xlabel("simulated time (seconds), 1 Gbit/s; large dots: means of the runs (small dots)")
    axes.set_ylabel("BLEU on test_2016_flickr")
    label_ends(axes, names)
    save_figure(figure, output)


def _bleu_title(lines: Mapping[str, list[tuple[float, float, Any]]]) -> str:
    """The first time at which both have a value, and what each has there."""
    pairs = [
        (seconds, value, system, other) for system, means in lines.items() if system != ALONE for seconds, value, _ in means
        for at, other, _ in lines.get(ALONE, ()) if abs(seconds - at) < 0.05 * at
    ]  # fmt: skip
    seconds, value, system, other = max(pairs, key=lambda pair: pair[1], default=(0.0, 0.0, "", 0.0))
    return f"BLEU after {seconds:.0f} s: {value:.1f} with four machines ({system}), {other:.1f} with one"


def _shown_settings(system: str, timed: Iterable[Trial]) -> tuple[str, ...]:
    """The settings of the longest runs of a system: those with which it was tuned."""
    its = [trial for trial in timed if trial.system == system and trial.place == FAST and trial.seed]
    return max(its, key=lambda trial: trial.words).settings


def _rows(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))
