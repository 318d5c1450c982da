"""When a shard updates, by how much, and whom it waits for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Make
from contexts import client, context
from memory import transports
from pulled import RATE, START, Vector, settings, strategy_of, target, trained
from simulated import run, words
from virtual import engine, everybody_is_here, together

from nmt_train.codec.dense import Dense
from nmt_train.codec.finite import finite
from nmt_train.common.errors import NotFinite
from nmt_train.common.message import Message
from nmt_train.modes import resolve as modes
from nmt_train.optim.config import OptimizerConfig
from nmt_train.optim.flat_model import FlatModel
from nmt_train.optim.optimizer import Optimizer
from nmt_train.server.shard import Shard
from nmt_train.simulation.cluster import Straggler
from nmt_train.simulation.virtual_transport import VirtualTransport
from nmt_train.strategy.config import ServerConfig
from nmt_train.strategy.update_rules import (
    Asynchronous,
    Rounds,
    SoftSync,
    StalenessAware,
    UpdateRule,
)

PLAIN = OptimizerConfig(name="sgd", learning_rate=1.0, schedule="constant", warmup=0)


def shard(rule: UpdateRule, workers: int) -> Shard:
    made = Shard(Optimizer(PLAIN, torch.zeros(2)), Dense(), None, rule)
    for worker in range(workers):
        made.pull(worker)
    return made


def push(made: Shard, worker: int, value: float) -> list[int]:
    """Push a gradient, and answer whom the shard wants answered."""
    now = made.push(worker, Message((), (torch.full((2,), -value),)))
    for other in now:
        made.answer(other)
    return now


def value(made: Shard) -> float:
    return float(made.optimizer.parameters[0])


def test_asynchronous_shards_take_what_comes_as_it_comes() -> None:
    made = shard(Asynchronous(1), 3)
    assert [push(made, worker, 1.0) for worker in (0, 1, 0, 2)] == [[0], [1], [0], [2]]
    assert (value(made), made.optimizer.updates) == (4.0, 4)


def test_steps_are_divided_by_staleness() -> None:
    made = shard(StalenessAware(1), 3)
    for worker in (0, 1, 2, 2):  # 0, 1, 2 and 0 updates old
        push(made, worker, 6.0)
    assert value(made) == 6.0 + 6.0 + 3.0 + 6.0
    assert dict(made.staleness) == {0: 2, 1: 1, 2: 1}


def test_softsync_updates_by_the_mean_of_so_many_pushes_and_holds_nobody_up() -> None:
    made = shard(SoftSync(2), 3)
    assert [push(made, worker, float(worker)) for worker in (0, 1, 2, 2)] == [[0], [1], [2], [2]]
    assert (value(made), made.optimizer.updates) == (0.5 + 2.0, 2)


def test_a_round_ends_when_all_have_pushed_and_then_all_are_answered() -> None:
    made = shard(Rounds(0), 3)
    assert [push(made, worker, 3.0 * worker) for worker in (2, 0, 1)] == [[], [], [2, 0, 1]]
    assert (value(made), made.optimizer.updates) == (3.0, 1)


def test_what_comes_after_its_round_is_dropped_and_its_worker_told_to_catch_up() -> None:
    made = shard(Rounds(1), 3)
    assert [push(made, worker, 1.0) for worker in (0, 1)] == [[], [0, 1]]
    assert push(made, 2, 100.0) == [2]
    assert (value(made), made.optimizer.updates) == (1.0, 1)
    assert [push(made, worker, 1.0) for worker in (2, 0)] == [[], [2, 0]]
    assert value(made) == 2.0


def test_a_round_does_not_wait_for_who_rests() -> None:
    made = shard(Rounds(0), 3)
    assert [push(made, worker, 1.0) for worker in (0, 1)] == [[], []]
    assert made.leave_round(2) == [0, 1]
    assert made.optimizer.updates == 1
    made.answer(0), made.answer(1)
    assert [push(made, worker, 1.0) for worker in (0, 1)] == [[], [0, 1]]
    assert push(made, 2, 1.0) == []  # it is back


def test_rounds_that_wait_for_all_are_sync() -> None:
    rounds = trained("backup", [1, 2], 7, {"server.backup": 0})
    for one, other in zip(rounds[0], trained("sync", [1, 2], 7)[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_one_pull_and_push_after_another_without_waiting_is_what_downpour_does() -> None:
    """One worker that pushes the mean of two gradients and fetches after every third step, followed by hand."""
    found = trained("downpour", [1], 7, {"batch.accumulate": 2, "server.pull_every": 3, "optimizer.name": "sgd"})[0]
    server = worker = START
    piled: list[torch.Tensor] = []
    for step in range(7):
        torch.testing.assert_close(found[step], worker, rtol=0, atol=1e-5)
        piled.append(worker - target(0))
        if len(piled) == 2:
            server = server - RATE * (piled[0] + piled[1]) / 2
            piled = []
        if step % 3 == 2:
            worker = server


def test_an_elastic_worker_and_the_center_go_the_same_way_towards_each_other() -> None:
    found = trained("easgd", [1], 9, {"local.every": 3, "local.elastic_share": 0.25})[0]
    worker = center = START
    for step in range(9):
        torch.testing.assert_close(found[step], worker, rtol=0, atol=1e-5)
        worker = worker - RATE * (worker - target(0))
        if step % 3 == 2:
            way = 0.25 * (worker - center)
            worker, center = worker - way, center + way


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"mode": "backup", "server__backup": 0}, {"mode": "softsync"}, {"mode": "downpour"},
                                     {"mode": "downpour", "batch__accumulate": 3, "server__pull_every": 2}])  # fmt: skip
def test_every_batch_is_done_once_whoever_rests_when(make: Make, tmp_path: Path, changes: dict[str, Any]) -> None:
    reference = run(make, tmp_path / "reference", [1], stop__after="2e")
    for seed in range(3):
        folder = run(make, tmp_path / f"{seed}", [2, 1], shuffle_seed=seed, stop__after="2e", **changes)
        assert words(folder) == words(reference)


@pytest.mark.slow
def test_with_a_backup_a_straggler_holds_nobody_up(make: Make, tmp_path: Path) -> None:
    from simulated import LINK, events

    slow = {**LINK, "stragglers": [Straggler(2, 5.0)]}
    seconds = []
    for backup in (0, 1):
        folder = run(make, tmp_path / f"{backup}", [1, 1, 1], mode="backup", server__backup=backup, stop__after="20u",
                     log__every="20u", places=slow)  # fmt: skip
        seconds.append(events(folder, "train")[-1]["seconds"])
    assert seconds[1] < 0.7 * seconds[0]


@pytest.mark.parametrize("last", [0, 1, 2])
def test_a_node_rests_when_all_its_devices_do_whoever_of_them_is_the_last(last: int) -> None:
    """One of three workers has a batch more than the others, as after one that was left out; in rounds of two nodes."""
    chosen = settings("backup", {"server.backup": 0, "server.per": "node"})

    def work(transport: VirtualTransport) -> int:
        flat = FlatModel(Vector())
        strategy = strategy_of(chosen, flat, transport)
        strategy.refresh()
        for _ in range(3 + (transport.rank == last)):
            transport.spend("forward", 1)
            flat.gradient.add_(flat.parameters - target(transport.rank), alpha=strategy.accumulator.add(1))
            strategy.step()
        strategy.drain()
        everybody_is_here(transport)
        strategy.refresh()
        return strategy.updates

    assert together(engine([2, 1]), *[work] * 3) == [4] * 3


def test_the_channel_of_a_node_is_free_again_after_an_error() -> None:
    transport = transports([0])[0]

    made_of = context(transport, torch.zeros(2), optimizer=PLAIN, server=ServerConfig(one_channel_per_node=True))
    made = client(made_of)
    made._prepare_push = lambda gradient: finite(torch.tensor(torch.nan))  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(NotFinite):
            made.exchange(torch.ones(2), torch.zeros(2), 1)


def test_a_round_of_nodes_never_waits_for_fewer_than_there_are_left(make: Make) -> None:
    config = make(mode="backup", server__per="node", server__backup=2)
    assert modes.fit(config, (0, 0, 1, 1)).server.backup == 1
    assert modes.fit(config, (0, 0, 1, 1, 2)).server.backup == 2
    assert modes.fit(make(mode="backup"), (0,)).server.backup == 0
    several_devices = make(mode="single", server__rule="rounds", server__backup=2)
    assert modes.fit(several_devices, (0, 0)).server.backup == 1


@pytest.mark.parametrize(
    ("ranks", "waves"), [(5, "{2: 0u, 4: 50u, 5: 2000u}"), (4, "{2: 0u, 4: 50u}"), (3, "{2: 0u, 3: 50u}"), (1, "{1: 0u}")]
)
def test_waves_still_come_when_ranks_have_ended(make: Make, ranks: int, waves: str) -> None:
    config = make(mode="vanilla", server__join="{2: 0u, 4: 50u, 5: 2000u}")
    assert str(modes.fit(config, tuple(range(ranks))).server.join) == waves
