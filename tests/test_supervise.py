"""Starting a job again: when, where, and with what."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nmt_train import launch, supervise
from nmt_train.errors import TRY_AGAIN, UserError
from nmt_train.supervise import Host, Job, answering, read_hosts


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


class Runs:
    """In the place of mpirun: what it was asked for, and the statuses that it ends with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *statuses: int) -> None:
        self.left, self.asked, self.hosts = list(statuses), [], []
        self.says = "[2026-11-22 06:00:00] stopped: stop.after 5e reached\n"
        monkeypatch.setattr(launch, "mpirun", self.run)
        monkeypatch.setattr(supervise.time, "sleep", lambda seconds: None)

    def run(self, ranks: int, arguments: list[str], options: list[str], heard: Callable[[str], None]) -> int:
        heard(self.says)
        self.asked.append((ranks, list(arguments)))
        self.hosts.append(Path(options[1]).read_text(encoding="utf-8").split("\n")[:-1] if options else [])
        return self.left.pop(0)


def reachable(monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str) -> None:
    """Only these machines answer."""
    agent = write(folder / "agent", f'#!/bin/sh\ncase " {" ".join(names)} " in *" $1 "*) exit 0;; esac\nexit 1\n')
    agent.chmod(0o755)
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", str(agent))


def test_a_file_of_machines_is_read_as_mpirun_reads_it(tmp_path: Path) -> None:
    text = "node1 slots=2  # the big one\n\n# node2 is being mended\nnode3\nnode4 slots = 1\n"
    assert read_hosts(write(tmp_path / "hosts", text)) == [Host("node1", 2), Host("node3", 1), Host("node4", 1)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node1\nnode2 two\n", "hosts, line 2: 'node2 two' is not a machine; write NAME, or NAME slots=RANKS"),
        ("node1 slots=0\n", "hosts, line 1: 'node1 slots=0' is not a machine"),
        ("# nothing\n", "names no machine; write one a line: NAME slots=RANKS"),
    ],
)
def test_what_is_no_machine_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_hosts(write(tmp_path / "hosts", text))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--hosts .*hosts: cannot be read"):
        read_hosts(tmp_path / "hosts")


def test_only_machines_that_answer_are_started_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reachable(monkeypatch, tmp_path, "a", "c")
    assert answering([Host("a"), Host("b"), Host("c", 2)]) == [Host("a"), Host("c", 2)]


@pytest.mark.parametrize("status", [0, 2, 130, 143])
def test_what_is_done_wrong_or_not_wanted_is_not_started_again(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    runs = Runs(monkeypatch, status)
    assert supervise.supervise(Job(restarts=3), 2) == status
    assert len(runs.asked) == 1


def test_a_job_that_was_lost_is_started_again_as_often_as_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch, TRY_AGAIN, 137, TRY_AGAIN)
    assert supervise.supervise(Job(restarts=2), 2) == TRY_AGAIN
    assert len(runs.asked) == 3


def test_a_job_that_never_began_is_not_done_whatever_mpirun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch, 0, 0)
    runs.says = "A daemon failed to report back after being spawned.\n"
    assert supervise.supervise(Job(restarts=1), 2) == TRY_AGAIN
    assert len(runs.asked) == 2


def test_what_there_is_by_then_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch, TRY_AGAIN, 0)
    supervise.supervise(Job(restarts=1, arguments=["--config", "a.yml", "--overwrite"]), 2)
    assert [arguments for _, arguments in runs.asked] == [["--config", "a.yml", "--overwrite"], ["--config", "a.yml"]]


def test_a_machine_that_comes_back_is_taken_in_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch, TRY_AGAIN, TRY_AGAIN, 0)
    answers = iter([[Host("a"), Host("b", 2)], [Host("a")], [Host("a"), Host("b", 2)]])
    monkeypatch.setattr(supervise, "answering", lambda hosts: next(answers))
    assert supervise.supervise(Job([Host("a"), Host("b", 2)], restarts=5), 1) == 0
    assert [ranks for ranks, _ in runs.asked] == [3, 1, 3]
    assert runs.hosts == [["a slots=1", "b slots=2"], ["a slots=1"], ["a slots=1", "b slots=2"]]


def test_where_no_machine_answers_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reachable(monkeypatch, tmp_path, "nobody")
    with pytest.raises(UserError, match="--hosts: none of a, b answers; look at the machines and at ssh"):
        supervise.supervise(Job([Host("a"), Host("b")]), 1)
