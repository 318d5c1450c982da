"""Runs many simulations at the same time; after an interruption, each run resumes when the script is started again."""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml
from prepare import BIN, ROOT

from nmt_train.cli import positive
from nmt_train.common.errors import UserError
from reproduce.runs import Setup


@dataclass(frozen=True)
class Job:
    """A command. The file `finished` exists when it is done. Its output goes to `<run>.log`, or to `output`."""

    run: Path
    command: tuple[str | Path, ...]
    finished: Path
    output: Path | None = None

    def start(self) -> subprocess.Popen[bytes]:
        self.run.parent.mkdir(parents=True, exist_ok=True)
        print(Path(self.command[0]).name, self.run.name, file=sys.stderr)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with open(f"{self.run}.log", "a") as log, open(self.output or os.devnull, "w") as output:
            # In its own session, so that Ctrl-C reaches only this script, which forwards it once.
            return subprocess.Popen(
                self.command, cwd=ROOT, stdout=output if self.output else log, stderr=log, env=environment,
                start_new_session=True,
            )  # fmt: skip

    def end(self, process: subprocess.Popen[bytes], stopped: bool = False) -> None:
        """stopped: this script has sent it SIGTERM. (A signal from elsewhere does not make a run complete.)"""
        if process.wait() not in (0, *[128 + signal.SIGTERM] * stopped):
            raise SystemExit(f"{self.run}.log: {self.run.name} failed; correct the cause and start again")
        if self.output is not None:
            self.output.replace(self.finished)
        self.finished.touch()


def simulation(setup: Setup, folder: Path, config: str, prefix: str, more: tuple[str, ...]) -> Job:
    """One simulation: a setup on the cluster configs/clusters/<prefix><cluster of the setup>.yml, with additional options.

    The vocabulary is in the parent of `folder`.
    """
    run, cluster = folder / setup.name, f"configs/clusters/{prefix}{setup.cluster}.yml"
    its = command(config, cluster, setup.mode, run, folder.parent / "vocabulary.model", setup.options)
    return Job(run, (*its, *more), run / "finished")


def command(
    config: str, cluster: str, mode: str, run: Path, vocabulary: Path, options: Iterable[str]
) -> tuple[str | Path, ...]:
    """That of nmt-simulate; options: key=value."""
    return (
        BIN / "nmt-simulate", "--config", config, "--cluster", cluster, "--mode", mode, "--run", run,
        "--corpus.vocabulary.path", vocabulary, *(f"--{option}" for option in options),
    )  # fmt: skip


def arguments(about: str | None, name: str, page: str, **flags: str) -> argparse.Namespace:
    """The options of a script that reproduces experiments.

    name: of the folder of its runs. page: what it writes in docs. flags: further options without a value, and their help.
    """
    options = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--timings", action="store_true", help="only words/s, without training")
    options.add_argument("--write", action="store_true", help="only write the page, from the CSV files and finished runs")
    for flag, what in flags.items():
        options.add_argument(f"--{flag}", action="store_true", help=what)
    options.add_argument("--jobs", type=positive, default=os.cpu_count() or 1, help="number of simultaneous runs")
    options.add_argument("--folder", type=Path, default=ROOT / "runs" / name)
    options.add_argument(
        "--output", type=Path, help=f"the page, with its CSV files and pictures beside it; default: docs/{page}"
    )
    options.add_argument("--fresh", action="store_true", help="use no results of others: write the page into --folder")
    given = options.parse_args()
    given.output = given.output or (given.folder / page if given.fresh else ROOT / "docs" / page)
    return given


def digest(config: str, *clusters: str, also: object = None) -> str:
    """Of the values in a configuration and in the files of configs/clusters that match these patterns; also: any others."""
    files = [ROOT / config, *(path for pattern in clusters for path in sorted((ROOT / "configs" / "clusters").glob(pattern)))]
    values = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in files]
    return hashlib.sha256(repr((values, also)).encode()).hexdigest()[:8]


def interruptible(main: Callable[[], int]) -> int:
    """Run the script; print a UserError as a sentence. On SIGINT or SIGTERM, its runs save and end, then the script ends."""

    def stop(number: int, _: object) -> None:
        raise KeyboardInterrupt(number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        return main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stopped:
        print("stopped; run the same command to continue", file=sys.stderr)
        return 128 + (stopped.args[0] if stopped.args else signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)


def side_by_side(
    jobs: list[Job],
    most: int,
    enough: Callable[[Job], bool] = lambda job: False,
    ended: Callable[[Job], None] = lambda job: None,
) -> None:
    """Run the unfinished jobs, at most `most` at a time, until each ends or `enough` is true of it; then call `ended`."""
    waiting = [job for job in jobs if not job.finished.exists()]
    running: dict[Job, subprocess.Popen[bytes]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < most:
                job = waiting.pop(0)
                if enough(job):  # it was interrupted before it was marked as finished
                    job.finished.touch()
                    ended(job)
                else:
                    running[job] = job.start()
            for job, process in list(running.items()):
                if process.poll() is None and not enough(job):
                    continue
                if stopped := process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                job.end(process, stopped)
                ended(job)
                del running[job]
            time.sleep(1)
    finally:
        for process in running.values():
            process.send_signal(signal.SIGTERM)
        for process in running.values():
            process.wait()
