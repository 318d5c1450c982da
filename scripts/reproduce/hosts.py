"""The thesis's modes over MPI on virtual hosts of this machine (scripts/netlab), and the same runs simulated beside them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from prepare import BIN, ROOT, prepare

from nmt_train.report import timeline
from nmt_train.report.figure import label_ends, look, new_figure, save_figure
from reproduce import thesis
from reproduce.campaign import Job, digest, side_by_side
from reproduce.claims import spread
from reproduce.runs import Runs, Setup, crossing, fitted
from reproduce.seeded import SEEDS
from reproduce.thesis_settings import sending

LAB, HOSTS_FILE = ROOT / "scripts" / "netlab", "/run/nmt-netlab/hosts"
CONFIG, MINUTES, VALIDATIONS = "configs/thesis-virtual.yml", 2, 12
_ABOUT = f"""\
`sudo scripts/reproduce/figure --hosts 2 --rate 100mbit --seeds 3`: MPI between virtual hosts of this machine, two with a core
each, or four with 0.4 cores each (h). {MINUTES} minutes of each mode, with the options of this page and the best rate of one
device (0.003); the thesis's sparse modes send 6.25%. *Speedup*: one host's time to the lowest cross-entropy that both reach,
divided by the mode's. *Simulated*: the same on a cluster file that `nmt-simulate --measure` made of these hosts.
"""
OURS = ("sparse", "sparse-overlap")
MODES = ("single", "vanilla", "overlap", *OURS, thesis.SPARSE, thesis.SPARSE_OVERLAP)
CORES = {2: "1", 3: "0.5", 4: "0.4"}  # of each host; the rest of two cores carries the messages
# With 6.25% of the elements, a run of two minutes has about as many visits of each element as the thesis's runs of hours.
SENT = sending(thesis.VISITS)[:2]


@dataclass(frozen=True)
class Place:
    """Virtual hosts. rate: of each link and direction, in units of tc, such as 100mbit."""

    hosts: int
    rate: str

    @property
    def name(self) -> str:
        return f"{self.hosts}-hosts-{self.rate}"

    @property
    def shown(self) -> str:
        """For readers."""
        return f"{self.hosts} hosts at {self.rate.replace('mbit', ' Mbit/s').replace('gbit', ' Gbit/s')}"

    def setup(self, mode: str, seed: int) -> Setup:
        """One device is trained beside the modes of each network, because a machine's speed changes from day to day."""
        return Setup(mode, self.name).with_seed(seed)

    def simulated(self, mode: str) -> Setup:
        return Setup(mode, f"{self.name}-simulated")


PLACES = tuple(Place(hosts, rate) for hosts in (2, 4) for rate in ("100mbit", "1gbit"))  # of docs/thesis.md


def complete(found: Runs, place: Place) -> list[int]:
    """The seeds with which all modes were trained there."""
    return [seed for seed in SEEDS if all(found.trained(place.setup(mode, seed)) for mode in MODES)]


def section(found: Runs) -> list[str]:
    """Markdown lines for docs/thesis.md: speedups of every mode on all hosts; draws the pictures beside the CSV files again."""
    places = {place: seeds for place in PLACES if (seeds := complete(found, place))}
    if not places:
        return []
    folder = f"thesis/{found.folder.name}"
    pictures = {place: draw(found, place, seeds).name for place, seeds in places.items()}
    first, *others = pictures
    return [
        "## Real hosts", "", _ABOUT, *_speedup_table(found, places), "", f"![{first.shown}]({folder}/{pictures[first]})", "",
        "What the worker of rank 0 does:", "", f"![timelines]({folder}/{first.name}-timelines.svg)", "",
        "; ".join(
            f"{place.shown}: [curves]({folder}/{pictures[place]}), [timelines]({folder}/{place.name}-timelines.svg)"
            for place in others
        ) + ".", "",
    ]  # fmt: skip


def _speedup_table(found: Runs, places: Mapping[Place, Sequence[int]]) -> list[str]:
    """Markdown lines: a row for each mode, a column for each place, and one for what was simulated of it."""
    simulated = {place for place in places if any(found.trained(place.simulated(mode)) for mode in MODES[1:])}
    heads = [
        head for place, seeds in places.items()
        for head in (f"{place.shown}{' (1)' if len(seeds) == 1 else ''}", *["simulated"] * (place in simulated))
    ]  # fmt: skip
    lines = [f"| speedup of | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for mode in MODES[1:]:
        cells = [f"`{mode}`"]
        for place, seeds in places.items():
            cells.append(spread(_speedups(found, place, mode, seeds)))
            if place in simulated:
                done = found.trained(place.simulated(mode))
                cells.append(f"{_simulated_speedup(found, place, mode):.2f}" if done else "")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def options(mode: str, seconds: int) -> tuple[str, ...]:
    """As in docs/thesis.md, but timed, and with the best rate of one device. Our two sparse modes have their defaults."""
    own = () if mode in OURS else thesis.ALWAYS[mode]
    sent = SENT if mode.startswith("thesis-") else ()
    return (
        *own, *sent, "optimizer.learning_rate=0.003", f"stop.after={seconds}s", f"validation.every={seconds / VALIDATIONS:g}s",
        "checkpoint.every=1h", "log.every=30s", "trace=true",
    )  # fmt: skip


def campaign(place: Place, seeds: Sequence[int], seconds: int, folder: Path, output: Path, jobs: int) -> Runs:
    """Train all modes, one after the other, with each seed; then simulate each once.

    output: for the CSV files and the cluster file that was measured on the hosts.
    """
    vocabulary = prepare(CONFIG, folder / "vocabulary.model")
    found = Runs(output, digest(CONFIG, also=(options("single", seconds), options(thesis.SPARSE, seconds))))
    missing = [(mode, seed) for seed in seeds for mode in MODES if not found.trained(place.setup(mode, seed))]
    cluster = output / f"{place.name}.yml"
    if missing or not cluster.exists():
        with virtual_hosts(place):
            measure(cluster, vocabulary)
            for mode, seed in missing:
                its = place.setup(mode, seed)
                run = folder / "training" / its.name
                side_by_side([Job(run, on_hosts(place, mode, run, vocabulary, seed, seconds), run / "finished")], 1)
                found.collect(folder)
    left = [mode for mode in MODES if mode != "single" and not found.trained(place.simulated(mode))]
    side_by_side([_simulation(place, mode, folder, cluster, vocabulary, seconds) for mode in left], jobs)
    found.collect(folder)
    return found


@contextmanager
def virtual_hosts(place: Place) -> Iterator[None]:
    up = (LAB, "up", "--hosts", str(place.hosts), "--rate", place.rate, "--cores", CORES[place.hosts])
    subprocess.run(up, check=True)
    try:
        yield
    finally:
        subprocess.run([LAB, "down"], check=True)


def measure(cluster: Path, vocabulary: Path) -> None:
    """Write the cluster file of the hosts, as a user would, unless it exists."""
    if cluster.exists():
        return
    its = ("--config", CONFIG, "--corpus.vocabulary.path", vocabulary, "--measure", "--hosts", HOSTS_FILE)
    done = subprocess.run([LAB, "run", "--", BIN / "nmt-simulate", *its], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    cluster.parent.mkdir(parents=True, exist_ok=True)
    cluster.write_bytes(done.stdout)


def on_hosts(place: Place, mode: str, run: Path, vocabulary: Path, seed: int, seconds: int) -> tuple[str | Path, ...]:
    return (
        LAB, "mpirun", "--", "-np", "1" if mode == "single" else str(place.hosts), BIN / "nmt-train",
        *_arguments(mode, run, vocabulary, seed, seconds),
    )  # fmt: skip


def _simulation(place: Place, mode: str, folder: Path, cluster: Path, vocabulary: Path, seconds: int) -> Job:
    run = folder / "training" / place.simulated(mode).name
    command = (BIN / "nmt-simulate", "--cluster", cluster, *_arguments(mode, run, vocabulary, 1, seconds))
    return Job(run, command, run / "finished")


def _arguments(mode: str, run: Path, vocabulary: Path, seed: int, seconds: int) -> tuple[str | Path, ...]:
    return (
        "--config", CONFIG, "--mode", mode, "--run", run, "--corpus.vocabulary.path", vocabulary, "--seed", str(seed),
        *(f"--{option}" for option in options(mode, seconds)),
    )  # fmt: skip


def draw(found: Runs, place: Place, seeds: Sequence[int]) -> Path:
    """Cross-entropy against time, beside the CSV files: the mean over seeds, and thin the simulated run, if there is one."""
    figure, axes = new_figure(7.5, 4.8, _title(found, place, seeds))
    names, thin = {}, False
    for mode in MODES:
        curves = [found.curve(place.setup(mode, seed)) for seed in seeds]
        (line,) = axes.plot(_mean(curves, "seconds"), _mean(curves, "cross-entropy"), marker="o", markersize=3, **look(mode))
        names[line] = mode
        if found.trained(place.simulated(mode)):
            thin = True
            simulated = [found.curve(place.simulated(mode))]
            its = _mean(simulated, "seconds"), _mean(simulated, "cross-entropy")
            axes.plot(*its, linewidth=0.7, color=line.get_color())
    axes.set_xlim(left=0)
    axes.set_ylim(top=6)  # the start is much the same for all
    axes.set_xlabel("wall-clock time (seconds)" + "; thin lines without dots: simulated" * thin)
    axes.set_ylabel("validation cross-entropy per word (nats)")
    label_ends(axes, names)
    picture = found.folder / f"{place.name}.svg"
    save_figure(figure, picture)
    return picture


def _title(found: Runs, place: Place, seeds: Sequence[int]) -> str:
    speeds = {mode: mean(_speedups(found, place, mode, seeds)) for mode in MODES}
    best = max(speeds, key=lambda mode: speeds[mode])
    return f"{best} on {place.shown} is {speeds[best]:.1f} times as fast as one host"


def timelines(place: Place, folder: Path, output: Path) -> list[Path]:
    """What the worker of rank 0 does in each mode, if the run folders of seed 1 are here."""
    runs = [folder / "training" / place.setup(mode, 1).name for mode in MODES]
    if not all((run / "trace").exists() for run in runs):
        return []
    return timeline.compare(runs, None, output / f"{place.name}-timelines.svg")


def _mean(curves: Sequence[Sequence[dict[str, Any]]], of: str) -> list[float]:
    """The mean over curves of each of their validations."""
    return [mean(event[of] for event in events) for events in zip(*curves, strict=False)]


def table(found: Runs, place: Place, seeds: Sequence[int]) -> str:
    """Markdown. Speedup: one device's time to a cross-entropy, divided by the mode's; the lowest one that both reach."""
    lines = ["| mode | words/s | cross-entropy at the end | speedup | simulated |", "|---|---|---|---|---|"]
    for mode in MODES:
        curves = [found.curve(place.setup(mode, seed)) for seed in seeds]
        words = mean(curve[-1]["words"] / curve[-1]["seconds"] for curve in curves)
        ends = spread([curve[-1]["cross-entropy"] for curve in curves], decimals=3)
        speedups = spread(_speedups(found, place, mode, seeds))
        simulated = f"{_simulated_speedup(found, place, mode):.2f}" if found.trained(place.simulated(mode)) else ""
        lines.append(f"| `{mode}` | {words:,.0f} | {ends} | {speedups} | {simulated} |")
    return "\n".join(lines)


def _speedups(found: Runs, place: Place, mode: str, seeds: Sequence[int]) -> list[float]:
    return [speedup(found.curve(place.setup(mode, seed)), found.curve(place.setup("single", seed))) for seed in seeds]


def _simulated_speedup(found: Runs, place: Place, mode: str) -> float:
    return speedup(found.curve(place.simulated(mode)), found.curve(place.setup("single", 1)))


def speedup(curve: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]]) -> float:
    target = thesis.SPARE + max(fitted(its, its[-1]["words"]) for its in (curve, base))
    return crossing(base, target) / crossing(curve, target)
