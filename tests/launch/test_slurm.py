"""Jobs of a real Slurm with two nodes on this machine (scripts/slurmlab), by the job scripts that come along."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from conftest import ROOT, Make
from written import last, written

from nmt_train.config import Config

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
LAB = str(ROOT / "scripts" / "slurmlab")
SCRIPTS = ROOT / "configs" / "slurm"
INSTALLING, PATIENCE = 240, 100  # seconds
OVER = {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL"}
SMALL = ("--cpus-per-task=1",)
FOREVER = {"mode": "vanilla", "stop__after": "100000e", "log__every": "5u", "checkpoint__every": "100000u"}


@pytest.fixture(scope="session", autouse=True)
def lab() -> Iterator[None]:
    """A Slurm that is up, one for all who test at the same time: the first starts it, the last ends it."""
    try:
        done = subprocess.run([LAB, "install"], capture_output=True, text=True, timeout=INSTALLING, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"scripts/slurmlab install took longer than {INSTALLING} s")
    if done.returncode:
        pytest.skip(done.stderr.strip())
    with open(Path(tempfile.gettempdir()) / "nmt-slurmlab.lock", "w") as lock:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            up = subprocess.run([LAB, "up"], capture_output=True, text=True, check=False)
            if up.returncode:
                pytest.skip(up.stderr.strip())
        fcntl.flock(lock, fcntl.LOCK_SH)  # where another starts it, when it has
        yield
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            subprocess.run([LAB, "down"], check=True)


def inside(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the lab."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [LAB, "run", "--", *command], capture_output=True, text=True, timeout=PATIENCE, env=environment, check=False
    )


def train(config: Config, *options: str) -> list[str]:
    return ["nmt-train", "--config", written(config), *options]


class Job:
    """A job of sbatch, which is cancelled at the end of a `with`."""

    def __init__(self, config: Config, arguments: Sequence[str]) -> None:
        folder = Path(config.run).parent
        self._said, self._log = folder / "job.log", Path(config.run) / "train.log"
        done = inside("sbatch", "--parsable", f"--output={self._said}", *SMALL, *arguments)
        assert done.returncode == 0, done.stderr
        self.number = done.stdout.strip()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        inside("scancel", "--full", "--signal=KILL", self.number)

    def facts(self) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S*)", inside("scontrol", "show", "job", self.number).stdout))

    def said(self) -> str:
        """What was printed, and what the run's log has."""
        return "".join(path.read_text(encoding="utf-8") for path in (self._said, self._log) if path.exists())

    def until(self, done: Callable[[], object], what: str) -> None:
        patience = time.monotonic() + PATIENCE
        while not done():
            assert time.monotonic() < patience, f"not {what}: {self.facts()}\n{self.said()}"
            time.sleep(0.1)

    def until_it_trains(self) -> None:
        self.until(lambda: "Up. " in self.said(), "training")

    def end(self) -> dict[str, str]:
        """What Slurm knows of it when it is over, and its processes are gone."""
        self.until(lambda: self.facts()["JobState"] in OVER, "over")
        self.until(lambda: "COMPLETING" not in inside("squeue", "--noheader", "--format=%T").stdout, "gone")
        return self.facts()


def shorten(config: Config) -> None:
    """What the same command finds when it runs again: it needs no more training."""
    path = Path(config.run).parent / "config.yml"
    values = path.read_text(encoding="utf-8").replace("[100000e]", "[1u]")
    path.write_text(values, encoding="utf-8")


def test_srun_trains_on_two_nodes(make: Make) -> None:
    done = inside("srun", "--mpi=pmix", "--nodes=2", *train(make(mode="sparse-overlap", stop__after="10u")))
    assert done.returncode == 0, done.stderr
    assert "2 ranks on nmtslurm1, nmtslurm2" in done.stderr
    assert "stop.after 10u reached" in done.stderr


def test_srun_without_pmix_is_refused_once_for_all_tasks(make: Make) -> None:
    offered = "pmi2"
    done = inside("srun", f"--mpi={offered}", "--nodes=2", *train(make(mode="vanilla")))
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("error: MPI: srun started 2 tasks, but each finds itself alone") == 1
    assert f"does not understand --mpi={offered}; start them with srun --mpi=pmix" in done.stderr
    assert done.stderr.count("Exited with exit code 2") == 2


def test_a_mistake_ends_srun_with_status_2(make: Make) -> None:
    done = inside("srun", "--mpi=pmix", "--nodes=2", *train(make(mode="vanilla"), "--corpus.valid", "[/none.en, /none.de]"))
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("error: corpus.valid: /none.en: No such file or directory") == 1


def test_the_script_for_gpus_trains_with_as_many_tasks_as_a_machine_has(make: Make) -> None:
    config = make(mode="sync", stop__after="10u")
    options = ("--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=2", "--export=ALL,DEVICES=cpu")
    with Job(config, [*options, str(SCRIPTS / "gpu.sh"), *train(config)[1:]]) as job:
        assert job.end()["JobState"] == "COMPLETED", job.said()
    assert re.search(r"2 ranks on nmtslurm\d\n", job.said())


def test_ranks_that_nmt_train_starts_in_a_job_are_spread_over_its_nodes(make: Make) -> None:
    config = make(mode="sync", stop__after="10u")
    with Job(config, ["--nodes=2", "--wrap", " ".join(train(config, "--devices", "'cpu x 2'"))]) as job:
        assert job.end()["JobState"] == "COMPLETED", job.said()
    assert "2 ranks on nmtslurm1, nmtslurm2" in job.said()


def test_scancel_and_the_time_limit_save_and_the_same_command_continues(make: Make) -> None:
    """Slurm looks every 30 seconds for jobs whose time is up."""
    config = make(**FOREVER)
    script = ["--nodes=2", "--wrap", " ".join(["srun", "--mpi=pmix", *train(config)])]
    with Job(config, script) as job:
        job.until_it_trains()
        inside("scancel", job.number)
        assert job.end()["JobState"] == "CANCELLED"
    assert "stopped: SIGTERM received" in job.said()
    saved = last(config).facts["progress"]["updates"]
    with Job(config, script) as job:
        job.until(lambda: f"at update {saved}" in job.said(), "continued")
        inside("scontrol", "update", f"JobId={job.number}", "EndTime=now")
        assert job.end()["JobState"] == "TIMEOUT"
    assert job.said().count("stopped: SIGTERM received") == 2
    assert last(config).facts["progress"]["updates"] > saved


@pytest.mark.parametrize(
    ("script", "how", "options"),
    [
        ("cpu.sh", "--signal=USR1", ()),
        ("one-machine.sh", "--signal=USR1", ("--export=ALL,DEVICES=cpu x 2",)),
    ],
)
def test_a_job_that_is_told_in_time_saves_is_queued_again_and_continues_to_its_end(
    make: Make, script: str, how: str, options: tuple[str, ...]
) -> None:
    config = make(**FOREVER)
    arguments = train(config, "--overwrite")[1:]
    with Job(config, ["--gpus=0", *options, str(SCRIPTS / script), *arguments]) as job:
        job.until_it_trains()
        shorten(config)
        inside("scancel", *how.split(), job.number)
        job.until(lambda: "stop.after 1u reached" in job.said(), "continued")
        facts = job.end()
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1")
    assert "stopped: SIGUSR1 received" in job.said()
    assert job.said().count("2 ranks on") == 2 * 2  # two starts, printed and logged
    assert "continuing from" in job.said()
