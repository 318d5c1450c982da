"""BLEU of the models that scripts/tune has trained, on a test set that no setting was chosen by."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from prepare import BIN, ROOT

from nmt_train.common.errors import UserError
from reproduce.campaign import Job, side_by_side
from reproduce.places import CONFIG, PLACES
from reproduce.runs import write_csv
from reproduce.trials import Trial

TEST = tuple(f"data/multi30k/test_2016_flickr.{language}.gz" for language in ("en", "de"))
_COLUMNS = ["system", "place", "words", "seed", "settings", "BLEU on test_2016_flickr", "cross-entropy on it"]


def measure(wanted: list[Trial], folder: Path, jobs: int, output: Path) -> None:
    """Translate the test set (beam 5) with the last checkpoint of each run, and add a line per run to the file `output`.

    Runs whose checkpoint is not in `folder` are trained again. Runs that are in the file are left out.
    """
    if any(PLACES[trial.place].config != CONFIG for trial in wanted):
        raise UserError(f"--bleu is for places with the corpus of {CONFIG}, which has a test set")
    rows = _read(output)
    done = {tuple(row[:5]) for row in rows}
    new = [trial for trial in wanted if tuple(_key(trial)) not in done]
    side_by_side([trial.job(folder) for trial in new], jobs)
    jobs_of = {trial: _job(trial, folder) for trial in new}
    side_by_side(list(jobs_of.values()), jobs)
    for trial, job in jobs_of.items():
        found = json.loads(job.finished.read_text(encoding="utf-8"))
        rows.append([*_key(trial), f"{found['bleu']:.2f}", f"{found['cross-entropy']:.4f}"])
    write_csv(output, [_COLUMNS, *rows])


def _read(path: Path) -> list[list[str]]:
    if not path.exists():
        return []
    with open(path, encoding="utf-8", newline="") as lines:
        return list(csv.reader(lines))[1:]


def _key(trial: Trial) -> list[str]:
    return [trial.system, trial.place, f"{trial.words}", f"{trial.seed}", " ".join(trial.settings)]


def _job(trial: Trial, folder: Path) -> Job:
    """One translation: bleu/<name>.json."""
    run = trial.job(folder).run
    finished = folder / "bleu" / f"{run.name}.json"
    command: tuple[str | Path, ...] = (
        BIN / "nmt-validate", run / "last", "--json", "--metrics", "bleu", "cross-entropy", "--test",
        *(ROOT / file for file in TEST),
    )  # fmt: skip
    return Job(finished.with_suffix(""), command, finished, finished.with_suffix(".part"))
