"""What a run says of itself: what is in force, what was forced, and whether its time is real."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from conftest import Make
from simulated import events, run, words
from virtual import cluster

from nmt_train import config as configuration
from nmt_train.cli import simulate as command
from nmt_train.common.errors import UserError
from nmt_train.config_text import to_yaml
from nmt_train.modes import resolve as modes
from nmt_train.report import convergence
from nmt_train.simulation.simulate import simulate
from nmt_train.training.start import start


def test_what_differs_from_the_configuration_is_said_with_its_reason(make: Make, tmp_path: Path) -> None:
    folder = run(make, tmp_path / "run", [1, 1], mode="sparse-overlap", optimizer__warmup=200, stop__after="4u")
    event = events(folder, "start")[-1]
    assert event["in_force"]["optimizer.warmup"].startswith("317 (200 configured, but updates of 2 workers are added up")
    assert event["in_force"]["optimizer.beta1"].startswith("0.4 (0.9 configured, but updates of 2 workers")
    assert event["in_force"]["server.up"] == "top-k (mode sparse-overlap)"
    for text in ("train.log", "config.yml"):
        assert "optimizer.warmup" in (folder / text).read_text(encoding="utf-8")
        assert "317 (200 configured" in (folder / text).read_text(encoding="utf-8")
    assert configuration.load([str(folder / "config.yml")], {}).optimizer.warmup == 200, "what was configured stays"


def test_a_single_device_has_no_settings_of_an_exchange(make: Make) -> None:
    config = make()
    start(config, False, False)
    folder = Path(config.run)
    assert events(folder, "start")[-1]["in_force"] == {}
    assert f"] in force: everything as in {folder / 'config.yml'}\n" in (folder / "train.log").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("sync", {"replicas.buckets", "replicas.codec"}),
        ("backup", {"server.up", "server.down", "server.rule", "server.backup"}),
        ("local-sgd", {"local.every", "replicas.codec"}),
        ("overlap", {"server.up", "server.down", "overlap.local_update", "optimizer.warmup", "optimizer.beta1"}),
        ("sparse", {"server.up", "server.down", "dropping.up", "dropping.down", "optimizer.warmup", "optimizer.beta1"}),
    ],
)
def test_only_settings_that_have_an_effect_on_the_run_are_said(make: Make, mode: str, expected: set[str]) -> None:
    config = make(mode=mode, optimizer__warmup=200)
    assert modes.resolve(config, (0, 1)).reasons.keys() == expected
    assert not any(name.startswith(("server.", "replicas.")) for name in modes.resolve(config, (0,)).reasons)


def test_a_run_that_a_time_limit_ended_says_what_is_missing_in_its_log(make: Make, tmp_path: Path) -> None:
    folder = run(make, tmp_path / "run", [1], stop__after=["8e", "6s"], log__every="2u")
    text = (folder / "train.log").read_text(encoding="utf-8")
    stopped = re.search(r"\] stopped: stop\.after 6s reached after ([0-9.]+) of 8 epochs\n", text)
    total = re.search(r"\] [0-9,]+ updates?, ([0-9.]+) epochs?, [0-9,]+ words in ", text)
    assert stopped is not None
    assert total is not None
    assert stopped[1] == total[1]
    last_line = [line for line in text.splitlines() if " Ep. " in line][-1]
    assert 0 < float(total[1]) <= int(last_line.split(" Ep. ")[1].split()[0])


@pytest.mark.parametrize("mode", ["sync", "local-sgd", "pipe", "backup", "single"])
def test_workers_that_wait_for_one_another_have_the_optimizer_that_was_configured(make: Make, mode: str) -> None:
    nodes = (0,) if mode == "single" else (0, 1)
    assert {"optimizer.warmup", "optimizer.beta1"}.isdisjoint(modes.resolve(make(mode=mode), nodes).reasons)


def test_what_was_forced_is_said_in_log_metrics_and_configuration(make: Make) -> None:
    config = make()
    start(config, False, False)
    changed = make(stop__after="9u", optimizer__learning_rate=0.02)
    start(changed, force=True, overwrite=False)
    folder, said = Path(config.run), "optimizer.learning_rate was 0.01, now 0.02"
    assert events(folder, "start")[-1]["forced"] == [said]
    assert f"warning: --force: {said}" in (folder / "train.log").read_text(encoding="utf-8")
    assert f"# forced: {said}\n" in (folder / "config.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize("changes", [{"corpus__vocabulary__size": 130}, {"model__heads": 4}, {"model__norm": "post"}])
def test_what_a_run_began_with_cannot_be_forced_to_change(make: Make, changes: dict[str, object]) -> None:
    start(make(), False, False)
    with pytest.raises(UserError, match=r"cannot change what it began with, not even with --force: .* was .*; restore it"):
        start(make(stop__after="9u", **changes), force=True, overwrite=False)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["vanilla", "sparse-overlap", "downpour", "sync", "local-sgd", "strom"])
def test_a_finished_run_that_is_started_again_stays_as_it_is(make: Make, tmp_path: Path, mode: str) -> None:
    same = {"mode": mode, "stop__after": "12u"}
    folder = run(make, tmp_path / "run", [1, 1], **same)
    last, trained = (folder / "last").resolve().name, words(folder)
    for _ in range(2):
        run(make, tmp_path / "run", [1, 1], **same)
        assert ((folder / "last").resolve().name, words(folder)) == (last, trained)


def test_a_simulation_never_continues_a_real_run_nor_the_other_way_round(make: Make) -> None:
    config = make()
    start(config, False, False)
    with pytest.raises(UserError, match="holds a real run, which a simulation would continue in virtual time; choose another"):
        simulate(config, cluster([1]), False, False)
    assert simulate(config, cluster([1]), False, overwrite=True) == 0
    with pytest.raises(UserError, match=r"holds a simulated run \(simulated.yml\), whose times are virtual; choose another"):
        start(dataclasses.replace(config), False, False)
    assert start(config, False, overwrite=True) == 0
    assert not (Path(config.run) / "simulated.yml").exists()


def test_a_simulated_run_says_so_everywhere(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run(make, tmp_path / "run", [1, 1], mode="sync", validation__every="3u", log__every="3u")
    assert {event["clock"] for kind in ("start", "train", "validation") for event in events(folder, kind)} == {"virtual"}
    assert "simulated: all times except the log's own are virtual" in (folder / "train.log").read_text(encoding="utf-8")
    assert "# simulated: all times are virtual" in (folder / "config.yml").read_text(encoding="utf-8")
    assert "bandwidth:" in (folder / "simulated.yml").read_text(encoding="utf-8")
    labels: list[str] = []
    monkeypatch.setattr(convergence, "save_figure", lambda figure, path: labels.append(figure.axes[0].get_xlabel()))
    convergence.plot([folder], "cross-entropy", "seconds", tmp_path / "x.png")
    assert labels == ["virtual time (seconds)"]


@pytest.mark.slow
def test_a_simulation_has_a_folder_of_its_own_unless_one_is_named(make: Make, tmp_path: Path) -> None:
    config = make(stop__after="3u", validation__every=None)
    file, clusters = tmp_path / "mine.yml", tmp_path / "cluster.yml"
    file.write_text(to_yaml(config), encoding="utf-8")
    clusters.write_text(
        "nodes: [1]\ndevice: {forward: {seconds: 1s}}\nnetwork: {bandwidth: 1 Gbit/s, latency: 1ms}\n"
        "inside: {bandwidth: 1 GB/s, latency: 1ms}\n", encoding="utf-8",
    )  # fmt: skip
    given = ["--config", str(file), "--cluster", str(clusters)]
    assert command.command(given) == 0
    assert command.command([*given, "--run", str(tmp_path / "named")]) == 0
    assert (Path(f"{config.run}-simulated") / "simulated.yml").exists()
    assert (tmp_path / "named" / "simulated.yml").exists()
    assert not Path(config.run).exists()
