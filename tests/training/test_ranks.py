"""Whole runs of several ranks with a real mpirun: promises, signals and failures."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import processes
import pytest
import torch
from conftest import ROOT, Make
from virtual import cluster
from written import last, written

from nmt_train import config as configuration
from nmt_train.common.errors import TRY_AGAIN
from nmt_train.config import Config
from nmt_train.report.timeline import read_spans
from nmt_train.run.log import read_metrics
from nmt_train.simulation.simulate import simulate
from nmt_train.training.start import start

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent
MPIRUN = [str(BIN / "mpirun"), "--oversubscribe", "--bind-to", "none"]
ENVIRONMENT = {
    **os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}  # fmt: skip
OURS = [sys.executable, "-m", "nmt_train.cli.entry"]
TIMEOUT = 300


def command(config: Config, *options: str) -> subprocess.CompletedProcess[str]:
    """nmt-train as a user would call it."""
    return finish([*OURS, "--config", written(config), *options])


def finish(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return processes.finish(arguments, ENVIRONMENT, TIMEOUT)


def background(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, start_new_session=True)


def patched(code: str) -> list[str]:
    """A rank whose `nmt_train` was tampered with: `code` runs first, and knows `rank`."""
    begin = "import os; rank = int(os.environ['OMPI_COMM_WORLD_RANK']); import torch, time\n"
    return [sys.executable, "-c", begin + code + "\nfrom nmt_train.cli.train import main; main()"]


BATCHES = """
from nmt_train.model.transformer import Transformer
seen, loss = [0], Transformer.loss
def tampered(model, batch):
    seen[0] += model.training
    value = loss(model, batch)
    {}
    return value
Transformer.loss = tampered
"""


COUNTED = """
import sys, weakref
from nmt_train.training.worker import Worker
workers, make, begun = weakref.WeakSet(), Worker.__init__, Worker.begun
def made(worker, *given):
    make(worker, *given)
    workers.add(worker)
def counted(worker, leader):
    begun(worker, leader)
    os.write(2, f"{len(workers)} workers in memory\\n".encode())
Worker.__init__, Worker.begun = made, counted
"""


def words(config: Config) -> int:
    return int(last(config).facts["progress"]["tokens"])


@pytest.fixture(scope="module")
def two_epochs(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Target tokens of two epochs, by one device."""
    from conftest import small

    values = small(demo, tmp_path_factory.mktemp("single") / "run") | {"stop": {"after": "2e"}, "batch": {"tokens": 300}}
    config = configuration.validate(values, {})
    assert start(config, force=False, overwrite=False) == 0
    return words(config)


def test_every_batch_of_an_epoch_is_read_once(make: Make, two_epochs: int) -> None:
    ranks = 3
    config = make(
        mode="sparse-overlap", devices=f"cpu x {ranks}", stop__after="2e", batch__tokens=300, validation__every="1e",
        log__every="10u", dropping={"up": 0.9, "down": 0.9},
    )  # fmt: skip
    done = command(config)
    assert done.returncode == 0, done.stderr
    assert "stop.after 2e reached" in done.stderr
    assert words(config) == two_epochs
    assert last(config).facts["progress"]["epochs"] == 2
    found = [event for event in read_metrics(Path(config.run) / "metrics.jsonl") if event["event"] == "ranks"]
    assert len(found[0]["ranks"]) == ranks
    pushes = [[event["ranks"][rank]["sent"].get("push", (0, 0))[0] for event in found] for rank in range(ranks)]
    assert all(sum(counts) > 0 for counts in pushes)  # in all, not in every report: a rank may start late
    assert all(torch.isfinite(tensor).all() for tensor in last(config).tensors("parameters").values())


def test_workers_that_join_later_read_what_is_left_of_the_epoch(make: Make, two_epochs: int) -> None:
    config = make(mode="sparse", server__join={1: "0u", 3: "7u"}, stop__after="2e", batch__tokens=300)
    done = finish([*MPIRUN, "-np", "3", *OURS, "--config", written(config)])
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("3 workers train from now on") == 1
    assert words(config) == two_epochs


def test_one_worker_is_single_bit_for_bit(make: Make, tmp_path: Path) -> None:
    alone = make(run=str(tmp_path / "alone"))
    assert start(alone, force=False, overwrite=False) == 0
    one = make(mode="sparse", run=str(tmp_path / "one"))
    done = finish([*MPIRUN, "-np", "1", *OURS, "--config", written(one)])
    assert done.returncode == 0, done.stderr
    expected, found = last(alone).tensors("parameters"), last(one).tensors("parameters")
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_a_checkpoint_of_three_ranks_goes_on_with_two_and_one_in_other_modes(make: Make, two_epochs: int) -> None:
    common = {"batch__tokens": 300, "dropping": {"up": 0.9}, "optimizer__smoothing": 0.1}
    common["overlap__bound"] = 1  # else a busy machine is in the third epoch after 50 updates
    three = make(mode="sparse", devices="cpu x 3", stop__after="30u", **common)
    done = command(three)
    assert done.returncode == 0, done.stderr
    saved = last(three)
    assert len(saved.facts["stages"][-1]) == 3
    assert sum(float(saved.tensors(f"worker-{rank}")["unsent"].abs().sum()) for rank in range(3)) > 0
    two = make(mode="sparse-overlap", devices="cpu x 2", stop__after="50u", **common)
    done = command(two)
    assert done.returncode == 0, done.stderr
    assert "continuing from" in done.stderr
    one = make(mode="single", devices="cpu", stop__after="2e", **common)
    assert start(one, force=False, overwrite=False) == 0
    assert words(one) == two_epochs


def test_the_trace_has_every_thread_of_every_rank_on_one_clock(make: Make) -> None:
    config = make(mode="overlap", devices="cpu x 2", stop__after="20u", trace=True)
    begin = time.time()
    assert command(config).returncode == 0
    spans = read_spans(Path(config.run))
    rows = {(span["rank"], span["thread"]) for span in spans}
    assert {(rank, thread) for rank in (0, 1) for thread in ("MainThread", "background task", "server")} <= rows
    assert all(begin < span["start"] <= span["end"] < time.time() for span in spans)


def test_ranks_with_other_settings_are_refused_by_name(make: Make, tmp_path: Path) -> None:
    left, right = make(mode="vanilla"), make(mode="vanilla", optimizer__learning_rate=0.02)
    arguments = [*MPIRUN, "-np", "1", *OURS, "--config", written(left), ":", "-np", "1", *OURS]
    done = finish([*arguments, "--config", written(right, "other.yml")])
    assert done.returncode != 0
    assert re.search(r"error: rank 1 \(host \S+\) disagrees .*optimizer.learning_rate: 0.02 there, 0.01 on rank 0", done.stderr)
    assert done.stderr.count("error:") == 1


def test_tasks_of_srun_that_mpi_does_not_join_are_refused_and_the_first_says_it(make: Make) -> None:
    arguments = [*OURS, "--config", written(make(mode="vanilla"))]
    for number, said in enumerate(("error: MPI: srun started 2 tasks, but each finds itself alone", "")):
        environment = {**ENVIRONMENT, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(number)}
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=TIMEOUT, env=environment, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith(said)
        assert ("--mpi=pmix" in done.stderr) == bool(said)


def test_a_rank_that_raises_ends_the_job_at_once_with_its_error_and_leaves_checkpoints_whole(make: Make) -> None:
    config = make(mode="sparse", stop__after="1000e", checkpoint__every="4u", transport__deadline=10 * TIMEOUT)
    code = BATCHES.format("if rank == 1 and seen[0] > 15: raise RuntimeError('boom')")
    done = finish([*MPIRUN, "-np", "3", *patched(code), "--config", written(config)])
    assert done.returncode != 0
    assert done.stderr.count(f"internal error: rank 1 (host {socket.gethostname()}): RuntimeError: boom") == 1
    assert "Traceback" not in done.stderr
    last(config)


def test_a_rank_that_never_comes_is_missed_within_the_deadline(make: Make) -> None:
    config = make(mode="vanilla", transport__start_deadline=4)
    done = finish([*MPIRUN, "-np", "2", *patched("if rank == 1: time.sleep(1000)"), "--config", written(config)])
    assert done.returncode != 0
    assert "transport.start_deadline" in done.stderr


def test_a_rank_that_hangs_ends_the_job_also_where_others_could_go_on(make: Make) -> None:
    config = make(mode="vanilla", stop__after="1000e", transport__deadline=3)
    code = BATCHES.format("if rank == 1 and seen[0] > 15: os.kill(os.getpid(), 19)")  # SIGSTOP
    done = finish([*MPIRUN, "--with-ft", "ulfm", "-np", "2", *patched(code), "--config", written(config)])
    assert done.returncode == 75, done.stderr
    assert re.search(r"error: rank 1 on host \S+ has been silent for \d+ s \(transport.deadline\)", done.stderr)


def test_devices_that_add_up_first_train_as_the_simulator_has_it_bit_for_bit(make: Make, tmp_path: Path) -> None:
    same = {"mode": "vanilla", "server__per": "node", "stop__after": "4e"}
    real, simulated = make(**same), dataclasses.replace(make(**same), run=str(tmp_path / "simulated"))
    done = finish([*MPIRUN, "-np", "2", *patched(""), "--config", written(real)])
    assert done.returncode == 0, done.stderr
    assert simulate(simulated, cluster([2]), False, False) == 0
    one, other = (last(config).tensors("parameters") for config in (real, simulated))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("mode", "ranks"), [("sync", 2), ("low-bit", 3)])
def test_workers_in_step_train_as_the_simulator_has_it_bit_for_bit(make: Make, tmp_path: Path, mode: str, ranks: int) -> None:
    same = {"mode": mode, "local__every": 3, "stop__after": "10u", "validation__every": "4u"}
    real, simulated = make(**same), dataclasses.replace(make(**same), run=str(tmp_path / "simulated"))
    done = finish([*MPIRUN, "-np", str(ranks), *patched(""), "--config", written(real)])
    assert done.returncode == 0, done.stderr
    assert simulate(simulated, cluster([1] * ranks), False, False) == 0
    one, other = (last(config).tensors("parameters") for config in (real, simulated))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_sums_of_mpi_and_of_torch_are_those_of_the_ring(make: Make, tmp_path: Path) -> None:
    sgd = {"optimizer__name": "sgd", "optimizer__learning_rate": 1.0, "optimizer__warmup": 0}
    same = {"mode": "sync", "stop__after": "6u", **sgd}
    ring = make(**same, run=str(tmp_path / "ring"))
    assert simulate(ring, cluster([1, 1]), False, False) == 0
    expected = last(ring).tensors("parameters")
    for algorithm, codec in (("mpi", "dense"), ("torch", "dense"), ("torch", "bf16")):
        library = {"replicas__algorithm": algorithm, "replicas__codec": codec, "run": str(tmp_path / f"{algorithm}-{codec}")}
        config = make(**same, **library)
        done = finish([*MPIRUN, "-np", "2", *patched(""), "--config", written(config)])
        assert done.returncode == 0, done.stderr
        found = last(config).tensors("parameters")
        assert all(torch.allclose(tensor, found[name], rtol=0, atol=1e-3) for name, tensor in expected.items()), library


def test_mode_auto_measures_and_chooses_and_a_resumed_run_keeps_the_choice(make: Make) -> None:
    for updates, said in (("4u", r"chose --mode ([\w-]+)"), ("8u", r"keeps ([\w-]+), with which the run began")):
        config = make(mode="auto", devices="cpu x 2", stop__after=updates)
        done = finish([*OURS, "--config", written(config)])
        assert done.returncode == 0, done.stderr
        found = re.search(f"mode auto: {said}", done.stderr)
        assert found is not None, done.stderr
        chosen = configuration.load([f"{config.run}/config.yml"], {}).mode
        assert found[1] == chosen == last(config).facts["config"]["mode"]
        assert "# mode auto: " in (Path(config.run) / "config.yml").read_text(encoding="utf-8")


def test_where_all_exchange_together_a_gradient_that_is_not_finite_is_left_out_by_all(make: Make) -> None:
    config = make(mode="sync", stop__after="12u", optimizer__not_finite="skip", optimizer__clip_norm=1.0)
    code = BATCHES.format("value = value * float('nan') if rank == 1 and seen[0] == 4 else value")
    done = finish([*MPIRUN, "-np", "2", *patched(code), "--config", written(config)])
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"skipped: rank 1 on host \S+, update \d+, batch 4 of epoch 1 .*: cost nan", done.stderr)) == 1
    assert len(re.findall(r"skipped: rank 0 on host \S+, update \d+, in the sum of all ranks' gradients", done.stderr)) == 1
    assert all(torch.isfinite(tensor).all() for tensor in last(config).tensors("parameters").values())


def test_a_signal_to_the_command_saves_and_ends_all_ranks(make: Make) -> None:
    number = signal.SIGINT
    config = make(mode="sparse-overlap", devices="cpu x 2", stop__after="1000e", log__every="5u", checkpoint__every="10000u")
    process = background([*OURS, "--config", written(config)])
    assert process.stderr is not None
    said = []
    for line in iter(process.stderr.readline, ""):
        said.append(line)
        if "Ep. " in line and len(said) < 10_000:
            process.send_signal(number)
            break
    said += process.stderr.readlines()
    assert process.wait(timeout=TIMEOUT) == 128 + number, said
    # Not what mpirun passes on: it may end before it has passed on the last lines.
    assert f"stopped: {number.name} received" in (Path(config.run) / "train.log").read_text(encoding="utf-8"), said
    last(config)


def test_a_signal_that_another_rank_has_reported_before_is_the_same_one(make: Make) -> None:
    """A launcher tells all ranks, but not at the same time."""
    config = make(mode="vanilla", stop__after="1000e", checkpoint__every="10000u")
    late = """
from nmt_train.training.leader import Leader
hear = Leader._hear
def heard(self, wait=False):
    before = self.signal
    hear(self, wait)
    if self.signal and not before:
        os.kill(os.getpid(), 10)
Leader._hear = heard
"""
    code = BATCHES.format("if rank == 1 and seen[0] == 6: os.kill(os.getpid(), 10)") + late
    done = finish([*MPIRUN, "-np", "2", *patched(code), "--config", written(config)])
    assert "stopped: SIGUSR1 received" in (Path(config.run) / "train.log").read_text(encoding="utf-8"), done.stderr
    last(config)


def test_a_signal_to_mpirun_itself_saves_although_mpirun_does_not_wait(make: Make) -> None:
    config = make(mode="vanilla", stop__after="1000e", log__every="5u", checkpoint__every="10000u")
    process = background([*MPIRUN, "-np", "2", *OURS, "--config", written(config)])
    assert process.stderr is not None
    for line in iter(process.stderr.readline, ""):
        if "Ep. " in line:
            break
    process.terminate()
    assert process.wait(timeout=TIMEOUT) != 0
    log, patience = Path(config.run) / "train.log", time.monotonic() + 30
    while "everything is in" not in log.read_text(encoding="utf-8"):
        assert time.monotonic() < patience
        os.sched_yield()
    assert "stopped: SIGTERM received" in log.read_text(encoding="utf-8")
    last(config)


@pytest.mark.netlab
def test_two_hosts_train_together_over_a_shaped_link(make: Make) -> None:
    lab = str(ROOT / "scripts" / "netlab")
    checked = subprocess.run([lab, "check"], capture_output=True, text=True, check=False)
    if checked.returncode:
        pytest.skip(checked.stderr.strip())
    config = make(mode="sparse-overlap", stop__after="30u", log__every="10u", trace=True)
    subprocess.run([lab, "up", "--hosts", "2", "--rate", "1gbit"], check=True, capture_output=True)
    try:
        done = finish([lab, "mpirun", "--", "-np", "3", *OURS, "--config", written(config)])
    finally:
        subprocess.run([lab, "down"], check=True)
    assert done.returncode == 0, done.stderr
    assert "3 ranks on nmtlab1, nmtlab2" in done.stderr
    assert {span["node"] for span in read_spans(Path(config.run))} == {0, 1}


@pytest.mark.parametrize(("mode", "ended"), [("vanilla", 0), ("sync", 1)])
def test_the_others_go_on_without_a_rank_that_is_killed(make: Make, mode: str, ended: int) -> None:
    config = make(mode=mode, stop__after="6e", batch__tokens=300, log__every="10u", recovery__every="5u", local__every=3)
    code = BATCHES.format(f"if rank == {ended} and seen[0] > 15: os.kill(os.getpid(), 9)") + COUNTED
    done = finish([*MPIRUN, "--with-ft", "ulfm", "-np", "3", *patched(code), "--config", written(config)])
    assert f"rank {ended} (host" in done.stderr, done.stderr
    assert "the other 2 ranks continue" in done.stderr
    assert "stop.after 6e reached" in done.stderr, done.stderr
    assert done.returncode == 0
    assert last(config).facts["progress"]["epochs"] == 6
    assert done.stderr.count("1 workers in memory") == 3 + 2


def test_a_signal_that_comes_while_ranks_recover_ends_training_when_they_have(make: Make) -> None:
    config = make(mode="overlap", stop__after="1000e", batch__tokens=300, recovery__every="5u")
    code = (
        BATCHES.format("if rank == 1 and seen[0] > 15: os.kill(os.getpid(), 9)")
        + """
from nmt_train.training import fault_tolerance as survive
recover = survive.recover
def asked(worker, remains):
    os.kill(os.getpid(), 15)
    return recover(worker, remains)
survive.recover = asked
"""
    )
    done = finish([*MPIRUN, "--with-ft", "ulfm", "-np", "3", *patched(code), "--config", written(config)])
    assert "the other 2 ranks continue" in done.stderr, done.stderr
    assert "stopped: SIGTERM received" in done.stderr, done.stderr
    assert "everything is in" in done.stderr, done.stderr
    last(config)


def hangs(rank: int) -> list[str]:
    """It gives up after one deadline from then on, however long other things took on a busy machine."""
    soon = "import nmt_train.transport.watchdog as watch; watch._DEADLINES, watch._TIMES = 1, 0"
    return patched(BATCHES.format(f"if rank == {rank} and seen[0] > 5: {soon}; time.sleep(1000)"))


def test_a_rank_that_hangs_while_it_computes_ends_itself_and_the_others_go_on(make: Make) -> None:
    config = make(mode="overlap", stop__after="4e", batch__tokens=300, transport__deadline=10)
    done = finish([*MPIRUN, "--with-ft", "ulfm", "-np", "3", *hangs(1), "--config", written(config)])
    assert re.search(r"error: rank 1 \(host \S+\): loss \(flat_model.py, line \d+\) has not ended for \d+ s", done.stderr), (
        done.stderr
    )
    assert "the other 2 ranks continue" in done.stderr
    assert "stop.after 4e reached" in done.stderr, done.stderr
    assert done.returncode == 0


def test_the_job_ends_where_the_others_cannot_go_on_without_the_rank_that_hangs(make: Make) -> None:
    config = make(mode="overlap", stop__after="1000e", batch__tokens=300, transport__deadline=10)
    done = finish([*MPIRUN, "-np", "2", *hangs(0), "--config", written(config)])
    assert re.search(r"error: rank 0 \(host \S+\): loss \(flat_model.py", done.stderr), done.stderr
    assert done.returncode == TRY_AGAIN
