"""Workers that go their own ways for some steps, and what becomes of these ways."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Make
from pulled import BY_SERVER, RATE, START, Vector, settings, strategy_of, target, trained
from safetensors.torch import load_file
from simulated import events, run
from virtual import engine, everybody_is_here, together

from nmt_train.common.errors import NotFinite, UserError
from nmt_train.modes import resolve as modes
from nmt_train.optim.flat_model import FlatModel
from nmt_train.simulation.cluster import Cost, DeviceConfig, LinkConfig
from nmt_train.simulation.virtual_transport import VirtualTransport
from nmt_train.strategy.local_steps import LocalWork
from nmt_train.strategy.state import WorkerState


def alone(start: torch.Tensor, rank: int, steps: int) -> torch.Tensor:
    """Where plain descent takes a worker by itself."""
    for _ in range(steps):
        start = start - RATE * (start - target(rank))
    return start


def mean_way(start: torch.Tensor, ranks: int, steps: int) -> torch.Tensor:
    return sum((alone(start, rank, steps) - start for rank in range(ranks)), torch.zeros(5)) / ranks


def test_averaging_after_every_plain_step_is_sync() -> None:
    local = trained("local-sgd", [1, 2], 7, {"local.every": 1})
    for one, other in zip(local[0], trained("sync", [1, 2], 7)[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", ["local-sgd", "sparse-local"])
def test_ways_may_be_added_up(mode: str) -> None:
    options = {"local.every": 2, "local.delay": 0, "local.outer": "sum", "replicas.codec": "dense"}
    for its in trained(mode, [1, 1], 3, options | {"replicas.own_updates": True}):
        torch.testing.assert_close(its[2], START + 2 * mean_way(START, 2, 2), rtol=0, atol=0.02)


def test_after_every_few_steps_all_go_on_from_the_mean() -> None:
    found = trained("local-sgd", [1, 1, 1], 7, {"local.every": 3})
    expected = START
    for step in (3, 6):
        expected = expected + mean_way(expected, 3, 3)
        for its in found:
            torch.testing.assert_close(its[step], expected, rtol=0, atol=1e-5)
    assert not torch.equal(found[0][5], found[1][5])
    torch.testing.assert_close(found[2][-1], expected + mean_way(expected, 3, 1), rtol=0, atol=1e-5)  # drained


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_a_mean_that_comes_later_replaces_the_way_to_it_and_keeps_the_steps_since(delay: int) -> None:
    found = trained("local-sgd", [1, 1, 1], 12, {"local.every": 3, "local.delay": delay})
    own, common, begun = [START] * 3, START, [START] * 3
    mean = torch.zeros(5)
    for step in range(1, 12):
        own = [alone(its, rank, 1) for rank, its in enumerate(own)]
        if step > 3 and (step - delay) % 3 == 0:
            common = common + mean
            own = [common + (its - left) for its, left in zip(own, begun, strict=True)]
            begun = [common] * 3
        if step % 3 == 0:
            mean = sum((its - left for its, left in zip(own, begun, strict=True)), torch.zeros(5)) / 3
            begun = own
        for its, expected in zip(found, own, strict=True):
            torch.testing.assert_close(its[step], expected, rtol=0, atol=1e-5)
    assert all(torch.equal(its[-1], found[0][-1]) for its in found), "drained"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"local.every": 3, "local.delay": 4},
            r"local.delay: 4 steps .*; set local.delay to at most 3",
        ),
        ({"local.every": 0, "local.delay": 1}, r"local.delay: with local.every 0, .*; set local.delay: 0"),
        ({"tiles.size": 100, "tiles.keep": 101}, r"tiles.keep: 101 elements are more than .* \(tiles.size 100\); lower it"),
        ({"local.outer": "elastic"}, r"local.outer: elastic needs a server, .*; use mode easgd"),
    ],
)
def test_what_cannot_be_combined_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        modes.resolve(settings("local-sgd", changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"local.outer": "sum", "server.rule": "rounds"}, r"local.outer: sum .*; remove one"),
        ({"local.outer": "elastic", "local.delay": 1}, r"local.delay: with local.outer elastic, .*; set local.delay: 0"),
        ({"server.bundle": 2}, r"server.bundle: with server.rule async, .*; set server.rule: softsync"),
    ],
)
def test_what_cannot_be_combined_at_a_server_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        modes.resolve(settings("diloco-async", changes))


@pytest.mark.slow
@pytest.mark.parametrize(("delay", "steps_per_round"), [(0, 6), (3, 3)])
def test_with_a_delay_workers_compute_while_they_exchange(make: Make, tmp_path: Path, delay: int, steps_per_round: int) -> None:
    """On a network where an exchange takes as long as three steps."""
    step = DeviceConfig(forward=Cost("100ms", "0s"), backward=Cost("0s", "0s"), update=Cost("0s", "0s"))
    elements = sum(tensor.numel() for tensor in load_file(one_run(make, tmp_path) / "last" / "parameters.safetensors").values())
    rate = f"{4 * elements / 0.3} B/s"  # a ring of two ranks sends all values once
    network = {"network": LinkConfig(rate, "0s"), "inside": LinkConfig(rate, "0s")}
    folder = run(
        make, tmp_path / "run", [1, 1], step, places=network, mode="local-sgd", stop__after="40u", local__every=3,
        local__delay=delay, log__every="10u",
    )  # fmt: skip
    first, *_, last = (event["seconds"] for event in events(folder, "train"))
    assert last - first == pytest.approx(30 * steps_per_round * 0.1, rel=0.02)


def one_run(make: Make, folder: Path) -> Path:
    return run(make, folder / "one", [1], stop__after="1u")


@pytest.mark.parametrize("changes", [{"server.rule": "rounds"}, {"server.per": "node"}])
def test_a_worker_that_is_drained_is_not_waited_for(changes: dict[str, str]) -> None:
    """One worker has just exchanged when all are drained, the others have made another step."""
    chosen, room = settings("diloco-async", BY_SERVER | {"local.every": 3, **changes}), engine([2, 1])

    def work(transport: VirtualTransport) -> torch.Tensor:
        flat = FlatModel(Vector())
        strategy = strategy_of(chosen, flat, transport)
        strategy.refresh()
        for _ in range(3 + (transport.rank > 0)):
            flat.gradient.add_(flat.parameters - target(transport.rank), alpha=strategy.accumulator.add(1))
            strategy.step()
        strategy.drain()
        everybody_is_here(transport)
        strategy.refresh()
        return flat.parameters

    found = together(room, *[work] * 3)
    assert all(torch.equal(its, found[0]) for its in found)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("local-sgd", {}), ("local-sgd", {"local.delay": 2}), ("diloco", {}), ("sparse-local", {"local.every": 3}),
        ("diloco-async", BY_SERVER), ("diloco-async", BY_SERVER | {"local.delay": 2}),
        ("diloco-async", BY_SERVER | {"server.per": "node"}), ("diloco-async", {}), ("easgd", {}),
    ],
)  # fmt: skip
def test_a_worker_that_has_diverged_drops_its_local_steps_and_starts_again_from_what_it_received(
    mode: str, options: dict[str, Any]
) -> None:
    """The third step moves one worker so far that the norm of its change is not finite."""
    chosen, room = settings(mode, {"local.every": 3, "optimizer.learning_rate": 16, **options}), engine([1, 2])

    def attempt(do: Callable[[], Any]) -> bool:
        try:
            do()
            return True
        except NotFinite:
            return False

    def work(transport: VirtualTransport) -> tuple[int, torch.Tensor]:
        flat, skipped = FlatModel(Vector()), 0
        strategy = strategy_of(chosen, flat, transport)
        strategy.refresh()
        everybody_is_here(transport)
        for step in range(12):
            gradient = (flat.parameters - target(transport.rank)) / 128
            if step == 2 and transport.rank == 1:
                gradient[0] = 1.5e19
            flat.gradient.add_(gradient, alpha=strategy.accumulator.add(1))
            skipped += not attempt(strategy.step)
        while not attempt(strategy.drain):
            skipped += 1
        everybody_is_here(transport)
        strategy.refresh()
        return skipped, flat.parameters

    found = together(room, *[work] * 3)
    skipped = [number for number, _ in found]
    assert skipped == ([1, 1, 1] if modes.resolve(chosen).synchronous else [0, 1, 0])
    assert all(parameters.abs().max() < 100 for _, parameters in found)


@pytest.mark.parametrize("options", [{"local.delay": 0}, {"local.delay": 1}])
@pytest.mark.parametrize("mode", ["local-sgd", "diloco-async"])
def test_a_residual_in_local_steps_that_are_dropped_is_owed_again(mode: str, options: dict[str, Any]) -> None:
    """Of an earlier mode, which sent gradients: it is in one local step, and sent with the change by that step."""
    chosen = settings(
        mode, {"local.every": 2, "optimizer.name": "sgd", "optimizer.clip_norm": 0, "local.outer": "none"} | options
    )

    def work(transport: VirtualTransport) -> None:
        flat, ones = FlatModel(Vector()), torch.ones(5)
        strategy = strategy_of(chosen, flat, transport)
        strategy.load(WorkerState(residual=ones))
        strategy.refresh()
        start = flat.parameters.clone()

        def step() -> None:
            strategy.accumulator.add(1)
            strategy.step()

        step()
        assert strategy.state().residual is None
        flat.parameters[0] = torch.inf
        with pytest.raises(NotFinite):
            step()
            strategy.drain()
        assert torch.equal(strategy.state().residual, ones)
        step()
        step()
        strategy.drain()
        strategy.refresh()
        torch.testing.assert_close(flat.parameters, start - RATE * ones)
        assert strategy.state().residual is None

    together(engine([1]), work)


@pytest.mark.parametrize("mode", ["local-sgd", "sparse-local"])
def test_an_unsent_change_of_an_earlier_start_is_applied_once_although_another_worker_has_no_batch(mode: str) -> None:
    options = {"local.every": 1, "local.delay": 0, "local.outer": "none", "replicas.codec": "dense"}
    chosen, room = settings(mode, options), engine([1, 1])

    def work(transport: VirtualTransport) -> torch.Tensor:
        flat = FlatModel(Vector())
        strategy = strategy_of(chosen, flat, transport)
        if transport.rank == 0:
            strategy.load(WorkerState(unsent=torch.ones(5)))
        strategy.refresh()
        for step in range(2):
            if step == 0 and transport.rank == 1:
                strategy.skip()
            else:
                strategy.accumulator.add(1)
                strategy.step()
        return flat.parameters

    for parameters in together(room, work, work):
        torch.testing.assert_close(parameters, START + 1)


def test_simuparallel_averages_once_at_the_end() -> None:
    found = trained("simuparallel", [1, 1], 9, {"stop.after": "1e"})
    for rank, its in enumerate(found):
        torch.testing.assert_close(its[8], alone(START, rank, 8), rtol=0, atol=1e-5)
    torch.testing.assert_close(found[0][-1], START + mean_way(START, 2, 9), rtol=0, atol=1e-5)
    assert torch.equal(found[0][-1], found[1][-1])


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["1e", "20t"])
def test_more_local_steps_than_the_run_has_are_refused(make: Make, tmp_path: Path, stop: str) -> None:
    changes = {"mode": "local-sgd", "local__every": 1000, "stop__after": stop}
    with pytest.raises(
        UserError, match=r"local.every: 1000 steps are more than each of 2 workers makes .* about \d+\); give fewer"
    ):
        run(make, tmp_path, [1, 1], **changes)
    assert run(make, tmp_path / "once", [1, 1], **changes | {"local__every": 0})


def test_diloco_takes_the_mean_way_as_the_gradient_of_nesterovs_momentum() -> None:
    options = {"local.every": 4, "local.outer_rate": 0.5, "local.outer_momentum": 0.8, "replicas.codec": "dense"}
    found = trained("diloco", [1, 1], 12, options)
    parameter = torch.nn.Parameter(START.clone())
    outer = torch.optim.SGD([parameter], lr=0.5, momentum=0.8, nesterov=True)
    for step in (4, 8, 12):
        parameter.grad = -mean_way(parameter.detach().clone(), 2, 4)
        outer.step()
        torch.testing.assert_close(found[0][step], parameter.detach(), rtol=0, atol=1e-5)
        assert torch.equal(found[0][step], found[1][step])


@pytest.mark.parametrize("more", [{"server.rule": "softsync", "server.bundle": 2}, {}])
def test_deltas_of_a_server_replace_the_way_of_a_worker_as_whole_parameters_do(more: dict[str, Any]) -> None:
    options = {"local.every": 4, "server.up": "dense", **more}
    dense = trained("diloco-async", [1, 1], 24, options | {"server.down": "dense"})
    deltas = trained("diloco-async", [1, 1], 24, options | {"server.down": "half"})
    for rank in (0, 1):
        torch.testing.assert_close(deltas[rank][24], dense[rank][24], rtol=0, atol=5e-3)


@pytest.mark.slow
def test_a_run_that_averages_once_ends_validated_with_what_all_have_in_common(make: Make, tmp_path: Path) -> None:
    folder = run(
        make, tmp_path / "run", [1, 1], mode="simuparallel", local__every=None, stop__after="3e", validation__every="1e"
    )
    validations = events(folder, "validation")
    assert [event["update"] for event in validations] == [1]
    assert json.loads((folder / "last" / "checkpoint.json").read_text())["progress"]["epochs"] == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "chain",
    [
        ("sparse", "local-sgd", "diloco", "single"), ("single", "diloco", "sync", "sparse", "pipe"),
        ("diloco", "diloco-async", "local-sgd", "diloco-async", "diloco", "sparse"),
    ],
)  # fmt: skip
def test_a_run_goes_on_in_any_other_mode(make: Make, tmp_path: Path, chain: tuple[str, ...]) -> None:
    for number, mode in enumerate(chain, 1):
        nodes = [1] if mode == "single" else [1, 1]
        folder = run(make, tmp_path / "run", nodes, mode=mode, stop__after=f"{number}e", dropping__up=0.9)
    assert json.loads((folder / "last" / "checkpoint.json").read_text())["progress"]["epochs"] == len(chain)


@pytest.mark.slow
def test_local_steps_continue_the_learning_rate_of_another_mode_on_every_rank(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a rank that serves no shard, and has not heard from one yet."""
    counted: list[int] = []
    load = LocalWork.load

    def loaded(work: LocalWork, state: WorkerState, updates: int) -> None:
        load(work, state, updates)
        counted.append(work.total)

    run(make, tmp_path / "run", [1, 1], mode="sync", stop__after="10u")
    monkeypatch.setattr(LocalWork, "load", loaded)
    run(make, tmp_path / "run", [1, 1], mode="diloco-async", server__shards=1, stop__after="14u")
    assert counted == [10, 10]
