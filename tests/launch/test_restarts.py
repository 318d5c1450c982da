"""Starting a job again: when, where, and with what."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import chain, pairwise, repeat
from pathlib import Path
from typing import Any

import pytest

from nmt_train.common.errors import TRY_AGAIN, UserError
from nmt_train.launch import mpirun as launch
from nmt_train.launch import restarts as supervise
from nmt_train.launch.restarts import Host, Job, answering, read_hosts


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


class Runs:
    """In the place of mpirun: what it was asked for, and the statuses that it ends with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *statuses: int) -> None:
        self.left, self.asked, self.hosts, self.restarted = list(statuses), [], [], []
        self.says = ["[2026-11-22 06:00:00] stopped: stop.after 5e reached\n"]  # the last one is repeated
        monkeypatch.setattr(launch, "mpirun", self.run)
        monkeypatch.setattr(supervise.time, "sleep", lambda seconds: None)

    def run(self, ranks: int, arguments: list[str], options: list[str], heard: Callable[[str], None]) -> int:
        heard(self.says[0])
        self.says = self.says[1:] or self.says
        self.asked.append((ranks, list(arguments)))
        file = dict(pairwise(options)).get("--hostfile", os.devnull)
        self.hosts.append(Path(file).read_text(encoding="utf-8").split("\n")[:-1])
        self.restarted += [option for option in options if option.startswith("NMT_TRAIN_RESTARTED=")] or [""]
        return self.left.pop(0)


def reachable(monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str) -> None:
    """Only these machines answer."""
    agent = write(folder / "agent", f'#!/bin/sh\ncase " {" ".join(names)} " in *" $1 "*) exit 0;; esac\nexit 1\n')
    agent.chmod(0o755)
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", str(agent))


def test_a_file_of_machines_is_read_as_mpirun_reads_it(tmp_path: Path) -> None:
    text = "node1 slots=2  # the big one\n\n# node2 is being mended\nnode3\nnode4 slots = 1\nnode3\nnode1 slots=2\n"
    assert read_hosts(write(tmp_path / "hosts", text)) == [Host("node1", 4), Host("node3", 2), Host("node4", 1)]


@pytest.mark.parametrize(
    "name",
    ["node-1.example.org", "gpu_7", "10.0.0.7", "fe80::1", "fe80::1%eth0", "::ffff:10.0.0.7", "me@node1", "a.b-c@10.0.0.7"],
)
def test_names_and_addresses_are_machines(tmp_path: Path, name: str) -> None:
    assert read_hosts(write(tmp_path / "hosts", f"{name} slots=2\n")) == [Host(name, 2)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node1\nnode2 two\n", "hosts, line 2: 'node2 two' is not a machine; write NAME, or NAME slots=RANKS"),
        ("node1 slots=0\n", "hosts, line 1: 'node1 slots=0' is not a machine"),
        ("-oProxyCommand=id\n", "hosts, line 1: '-oProxyCommand=id' is not a machine"),
        ("me@-v\n", "hosts, line 1: 'me@-v' is not a machine"),
        ("-l@node1\n", "hosts, line 1: '-l@node1' is not a machine"),
        ("node1;id\n", "hosts, line 1: 'node1;id' is not a machine"),
        ("$(id)\n", "is not a machine"),
        ("node1,node2\n", "hosts, line 1: 'node1,node2' is not a machine"),
        ("node1 slots=123456\n", "hosts, line 1: 'node1 slots=123456' is not a machine"),
        ("# nothing\n", "names no machine; write one per line: NAME slots=RANKS"),
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


@pytest.mark.parametrize("agent", [None, "ssh -p 2222"])
def test_ssh_takes_no_machine_for_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: str | None) -> None:
    ssh = write(tmp_path / "ssh", f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("PRTE_MCA_plm_ssh_agent", raising=False)
    if agent:
        monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", agent)
    assert answering([Host("node1")]) == [Host("node1")]
    assert (tmp_path / "asked").read_text(encoding="utf-8").endswith(" -- node1 true\n")


@pytest.mark.parametrize("status", [0, 2, 130, 143])
def test_what_is_done_wrong_or_not_wanted_is_not_started_again(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    runs = Runs(monkeypatch, status)
    assert supervise.supervise(Job(restarts=3), 2) == status
    assert len(runs.asked) == 1


def test_a_job_that_was_lost_is_started_again_as_often_as_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch, TRY_AGAIN, 137, TRY_AGAIN)
    assert supervise.supervise(Job(restarts=2), 2) == TRY_AGAIN
    assert len(runs.asked) == 3


def test_a_job_that_never_began_is_not_done_whatever_mpirun_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs(monkeypatch, 0, 0)
    runs.says = ["A daemon failed to report back after being spawned.\n"]
    assert supervise.supervise(Job(restarts=1), 2) == TRY_AGAIN
    assert len(runs.asked) == 2
    assert "error: mpirun ended without an error, but before training did" in capsys.readouterr().err


def test_what_there_is_by_then_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch, TRY_AGAIN, 0)
    runs.says = ["[2026-11-22 06:00:00] started over: deleted the previous contents of run (--overwrite)\n"]
    supervise.supervise(Job(restarts=1, arguments=["--config", "a.yml", "--overwrite"]), 2)
    assert [arguments for _, arguments in runs.asked] == [["--config", "a.yml", "--overwrite"], ["--config", "a.yml"]]


def test_an_old_run_that_was_to_be_overwritten_is_not_continued_where_the_new_one_never_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = Runs(monkeypatch, TRY_AGAIN, 0)
    runs.says = ["error: rank 1 of 2 did not show up\n"]
    supervise.supervise(Job(restarts=1, arguments=["--overwrite"]), 2)
    assert [arguments for _, arguments in runs.asked] == [["--overwrite"], ["--overwrite"]]


def test_ranks_are_told_when_their_job_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch, TRY_AGAIN, TRY_AGAIN, TRY_AGAIN, 0)
    nothing, begun = "error: rank 1 of 2 did not show up\n", "[2026-11-22 06:00:00] in force: mode sync\n"
    runs.says = [nothing, begun, nothing, *runs.says]
    supervise.supervise(Job(restarts=3), 2)
    before, after = (f"NMT_TRAIN_RESTARTED={value}" for value in ("not-begun", "begun"))
    assert runs.restarted == ["", before, after, after]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_between_two_starts_ends_the_supervision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    mpirun = write(tmp_path / "mpirun", f"#!/bin/sh\necho started >> {tmp_path}/starts\nexit {TRY_AGAIN}\n")
    mpirun.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(supervise, "_say", lambda text: os.kill(os.getpid(), number))
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    assert supervise.supervise(Job(restarts=3), 2) == 128 + number
    assert (tmp_path / "starts").read_text(encoding="utf-8") == "started\n"
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_signal_while_mpirun_is_being_started_reaches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "mpirun", "#!/bin/sh\nexec sleep 600\n").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    popen = subprocess.Popen

    def started(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        job = popen(*arguments, **options)
        os.kill(os.getpid(), signal.SIGTERM)
        return job

    monkeypatch.setattr(launch.subprocess, "Popen", started)
    assert supervise.supervise(Job(restarts=3), 2) == 128 + signal.SIGTERM


def test_a_machine_that_comes_back_is_taken_in_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch, TRY_AGAIN, TRY_AGAIN, 0)
    answers = iter([[Host("a"), Host("b", 2)], [Host("a")], [Host("a"), Host("b", 2)]])
    monkeypatch.setattr(supervise, "answering", lambda hosts: next(answers))
    assert supervise.supervise(Job([Host("a"), Host("b", 2)], restarts=5), 1) == 0
    assert [ranks for ranks, _ in runs.asked] == [3, 1, 3]
    assert runs.hosts == [["a slots=1", "b slots=2"], ["a slots=1"], ["a slots=1", "b slots=2"]]


@pytest.mark.parametrize("restarts", [0, 3])
def test_where_no_machine_answers_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int) -> None:
    reachable(monkeypatch, tmp_path, "nobody")
    with pytest.raises(UserError, match="--hosts: no answer from a, b; check the machines; `ssh MACHINE true` must work"):
        supervise.supervise(Job([Host("a"), Host("b")], restarts), 1)


def test_without_restarts_a_job_does_not_begin_on_fewer_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch, 0, 0)
    monkeypatch.setattr(supervise, "answering", lambda hosts: [Host("a")])
    with pytest.raises(UserError, match="--hosts: no answer from b; check the machines; .*; with --restarts"):
        supervise.supervise(Job([Host("a"), Host("b")]), 1)
    assert supervise.supervise(Job([Host("a"), Host("b")], restarts=1), 1) == 0
    assert runs.hosts == [["a slots=1"]]


def test_machines_of_which_none_answers_for_a_while_are_waited_for_without_using_up_restarts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs, pauses = Runs(monkeypatch, TRY_AGAIN, 0), list[float]()
    answers = iter([[Host("a")], *[[]] * 8, [Host("a")]])
    monkeypatch.setattr(supervise, "answering", lambda hosts: next(answers))
    monkeypatch.setattr(supervise.time, "sleep", pauses.append)
    assert supervise.supervise(Job([Host("a")], restarts=1), 1) == 0
    assert len(runs.asked) == 2
    assert pauses[1:] == [2, 4, 8, 16, 32, 60, 60, 60]


def test_machines_of_which_none_comes_back_are_given_up_after_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, pauses = Runs(monkeypatch, TRY_AGAIN), list[float]()
    answers = chain([[Host("a")]], repeat([]))
    monkeypatch.setattr(supervise, "answering", lambda hosts: next(answers))
    monkeypatch.setattr(supervise.time, "sleep", pauses.append)
    assert supervise.supervise(Job([Host("a")], restarts=1), 1) == TRY_AGAIN
    assert len(runs.asked) == 1
    assert 3600 <= sum(pauses) < 3700
