"""How much the speedups of the comparison depend on what codecs are assumed to cost: the page comparison/codec-costs.md."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from statistics import mean

from prepare import ROOT

from nmt_train.simulation import cluster_file
from nmt_train.simulation.cluster import CodecConfig, DeviceConfig
from reproduce.campaign import Job, side_by_side
from reproduce.places import FAST, PLACES, SLOW
from reproduce.trials import Trial, Trials

_SYSTEMS = {FAST: ("low-bit", "sparse-local", "strom", "powersgd"), SLOW: ("sparse-local", "strom", "powersgd")}
_FACTORS = (1.0, 0.5, 0.0)
# Rank 8 of the small model is charged like rank 32 of a large one; a large one with rank 8 sends as much as this.
_AS_LARGE = "plan=low_rank.rank=2,low_rank.dense_updates=0"
_ABOUT = """# What if codecs cost less?

Speedups (means over seeds) if each codec takes all, half or none of the time that it is charged
([why](protocol.md#objections)). Only words/s are simulated again, by `scripts/tune --codec-costs`; the words needed are the
same (those of `strom`, whose workers do not wait, would change a little). On CPUs, compiled loops now halve the encoding of
`low-bit` and tile-top-k. The second row of `powersgd` sends the bytes of a large model for which rank 8 suffices
([the task](protocol.md#the-task)).

| network | system | as charged | half | none |
|---|---|---|---|---|
"""


def write(trials: Trials, folder: Path, jobs: int, output: Path) -> None:
    """Simulate the timing of the best settings with cheaper codecs, in `folder`, and write the page."""
    rows: dict[tuple[str, str], tuple[Trial, Trial]] = {}
    for place, systems in _SYSTEMS.items():
        for system in systems:
            tuned = trials.tuned(system, place)
            if tuned is None:
                continue
            rows[place, f"`{system}`"] = tuned, tuned
            if (system, place) == ("powersgd", FAST):
                kept = tuple(setting for setting in tuned.settings if not setting.startswith("plan="))
                rows[place, "`powersgd`, bytes of a large model"] = tuned, replace(tuned, settings=(*kept, _AS_LARGE))
    timings = {(row, factor): _timing(timed, factor, folder) for row, (_, timed) in rows.items() for factor in _FACTORS}
    base = {row: tuned.timing(folder) for row, (tuned, _) in rows.items()}
    side_by_side(list(dict.fromkeys([*base.values(), *timings.values()])), jobs)
    text = _ABOUT
    for row, (tuned, _) in rows.items():
        speedup = mean(trials.speedups(tuned)) / _pace(base[row])
        cells = [f"{speedup * _pace(timings[row, factor]):.2f}" for factor in _FACTORS]
        text += f"| {' | '.join((*row, *cells))} |\n"
    output.write_text(text, encoding="utf-8")


def _timing(trial: Trial, factor: float, folder: Path) -> Job:
    if factor == 1.0:
        return trial.timing(folder)
    device = cluster_file.load(ROOT / PLACES[trial.place].cluster).device
    assert device is not None

    def scaled(its: DeviceConfig | CodecConfig) -> dict[str, dict[str, str]]:
        """Its costs of encoding and decoding, multiplied by `factor`."""
        costs = {"encode": its.encode, "decode": its.decode}
        return {
            kind: {key: f"{seconds * factor * 1e9:g} ns" for key, seconds in vars(cost).items()} for kind, cost in costs.items()
        }

    options = [f"cluster.device.{kind}.{key}={text}" for kind, cost in scaled(device).items() for key, text in cost.items()]
    codecs = {name: scaled(its) for name, its in device.codecs.items()}
    options.append(f"cluster.device.codecs={json.dumps(codecs)}")
    job = trial.timing(folder)
    run = job.run.with_name(f"{job.run.name}-codecs{factor:g}")
    command = [run if part == job.run else part for part in job.command]
    return dataclasses.replace(
        job, run=run, command=(*command, *(f"--{option}" for option in options)), finished=run / job.finished.name
    )


def _pace(job: Job) -> float:
    return float(json.loads(job.finished.read_text(encoding="utf-8"))["words_per_second"])
