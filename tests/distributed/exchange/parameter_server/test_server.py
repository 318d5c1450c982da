"""The parameter server, its shards, and the schedules on top of it, with several ranks in one process."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from contexts import Vector, context
from memory import MemoryTransport, together, transports
from torch import Tensor

from nmt_train.common.errors import NotFinite
from nmt_train.corpus import BatchConfig
from nmt_train.distributed.codec.config import DroppingConfig
from nmt_train.distributed.exchange.config import ServerConfig
from nmt_train.distributed.exchange.parameter_server.client import ParameterServer
from nmt_train.distributed.exchange.parameter_server.node_channel import NodeChannel
from nmt_train.distributed.exchange.parameter_server.per_node import PerNode
from nmt_train.distributed.exchange.single import SingleRank
from nmt_train.distributed.schedule.config import OverlapConfig
from nmt_train.distributed.schedule.every_step import EveryStep
from nmt_train.distributed.schedule.overlap import Overlap
from nmt_train.distributed.transport.local import LocalTransport
from nmt_train.optim.config import OptimizerConfig
from nmt_train.optim.flat_model import FlatModel

ADAM = OptimizerConfig(name="adam", learning_rate=0.1, schedule="constant", warmup=0, clip_norm=0)
SGD = OptimizerConfig(name="sgd", learning_rate=0.1, schedule="constant", warmup=0, clip_norm=0)
DROPPING = DroppingConfig(up=0.9, down=0.9, values="fp32")
START = torch.linspace(-1, 1, 101)


def server(
    transport: MemoryTransport,
    optimizer: OptimizerConfig = ADAM,
    sparse: bool = False,
    exchanges_updates: bool = False,
    **settings: Any,
) -> ParameterServer:
    codec, at = "top-k" if sparse else "dense", "worker" if exchanges_updates else "shard"
    own = ServerConfig(**settings)
    return ParameterServer(context(transport, START, codec, codec, at, optimizer=optimizer, server=own, dropping=DROPPING))


def alone(transport: Any, parameters: Tensor, optimizer: OptimizerConfig) -> SingleRank:
    """Updates the vector `parameters`."""
    flat = FlatModel(Vector(parameters))
    flat.parameters = parameters
    return SingleRank(context(transport, flat, optimizer=optimizer))


def gradients(count: int, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(len(START)) for _ in range(count)]


def sequential(given: Sequence[Tensor], optimizer: OptimizerConfig = ADAM) -> Tensor:
    parameters = START.clone()
    made = alone(LocalTransport(), parameters, optimizer)
    for gradient in given:
        made.sync(gradient.clone(), parameters)
    return parameters


@pytest.mark.parametrize(("nodes", "sparse"), [((0,), False), ((0, 1), False), ((0, 0, 0, 1), False), ((0,), True)])
def test_pushes_in_a_fixed_order_are_the_sequential_result(nodes: tuple[int, ...], sparse: bool) -> None:
    """Bit for bit where all is sent, or nothing needs to be."""
    servers = [server(transport, sparse=sparse) for transport in transports(nodes)]
    copies = [START.clone() for _ in nodes]
    given = gradients(7)
    for turn, gradient in enumerate(given):
        rank = turn % len(nodes)
        servers[rank].sync(gradient.clone(), copies[rank])
    last = (len(given) - 1) % len(nodes)
    assert torch.equal(copies[last], sequential(given))
    assert all(made.updates == 7 for made in servers)


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_ranks_without_a_shard_take_part_and_know_how_many_updates_there_were(shards: int) -> None:
    servers = [server(transport, shards=shards) for transport in transports([0, 0, 1, 1])]
    copies = [START.clone() for _ in servers]
    given = gradients(8)
    for turn, gradient in enumerate(given):
        servers[turn % 4].sync(gradient.clone(), copies[turn % 4])
    assert torch.equal(copies[3], sequential(given))
    assert servers[3].updates == 8
    for made, copy in zip(servers, copies, strict=True):
        made.refresh(copy)
        assert torch.equal(copy, copies[3])
        assert made.updates == 8
    assert sum(made.optimizer.parameters.numel() > 0 for made in servers) == shards


@pytest.mark.parametrize("bypass", [True, False])
def test_a_bypassed_shard_gets_and_gives_the_same_as_one_over_the_wire(bypass: bool) -> None:
    made, copy = server(transports([0])[0], bypass=bypass), START.clone()
    given = gradients(4)
    for gradient in given:
        made.sync(gradient.clone(), copy)
    assert torch.equal(copy, sequential(given))
    assert bool(made._transport.sent) is not bypass


def test_every_push_counts_whatever_the_order() -> None:
    """Plain gradient descent only adds up, so that the order of asynchronous pushes must not matter."""
    servers = [server(transport, SGD) for transport in transports([0, 0, 1])]
    given = [gradients(20, seed) for seed in range(3)]
    copies = [START.clone() for _ in given]

    def worker(rank: int) -> None:
        for gradient in given[rank]:
            servers[rank].sync(gradient.clone(), copies[rank])

    together(*(lambda rank=rank: worker(rank) for rank in range(3)))
    for made, copy in zip(servers, copies, strict=True):
        made.refresh(copy)
        torch.testing.assert_close(copy, START - 0.1 * sum(map(sum, given)), atol=1e-4, rtol=0)
        assert made.updates == 60
        assert sum(made.staleness.values()) == 60


def test_staleness_is_what_others_have_pushed_since_the_worker_last_heard() -> None:
    left, right = (server(transport) for transport in transports([0, 1]))
    a, b = START.clone(), START.clone()
    left.sync(torch.ones(101), a)
    left.sync(torch.ones(101), a)
    right.sync(torch.ones(101), b)  # has seen neither
    left.sync(torch.ones(101), a)
    assert dict(left.staleness) == dict(right.staleness) == {0: 2, 2: 1, 1: 1}


def test_an_overlapped_gradient_is_of_the_parameters_before_the_last_answer() -> None:
    transport, copy = transports([0])[0], START.clone()
    made = ParameterServer(context(transport, START, max_in_flight=1, optimizer=SGD))
    for _ in range(4):
        made.sync(torch.ones(101), copy)
    assert dict(made.staleness) == {0: 1, 1: 3}


def test_sparse_workers_and_shards_agree_on_what_was_sent_and_owe_the_rest() -> None:
    left, right = (server(transport, SGD, sparse=True, bypass=False) for transport in transports([0, 1]))
    copy, other = START.clone(), START.clone()
    left.refresh(copy)
    right.refresh(other)
    given = gradients(5)
    for gradient in given:
        left.sync(gradient.clone(), copy)
    assert torch.equal(torch.cat([made.service._shard._held[0] for made in (left, right)]), copy)
    owed = left.worker_state()["residual"]
    parameters = torch.cat([made.optimizer.parameters for made in (left, right)])
    torch.testing.assert_close(parameters, START - 0.1 * (sum(given) - owed), atol=1e-6, rtol=0)
    left.refresh(copy)
    assert torch.equal(copy, parameters)


def test_residuals_of_a_shard_that_is_now_bypassed_are_not_lost() -> None:
    made, copy = server(transports([0])[0], SGD, sparse=True), START.clone()
    made.load_worker_state({"residual": torch.ones(101)})
    made.sync(torch.zeros(101), copy)
    torch.testing.assert_close(copy, START - 0.1)
    made.sync(torch.zeros(101), copy)
    torch.testing.assert_close(copy, START - 0.1)


MAKERS = {
    "server": lambda transport: server(transport, SGD),
    "alone": lambda transport: alone(transport, START.clone(), SGD),
}


@pytest.mark.parametrize("name", MAKERS)
def test_what_another_mode_owed_is_given_once_and_saved_until_then(name: str) -> None:
    made, copy = MAKERS[name](transports([0])[0]), START.clone()
    made.load_worker_state({"residual": torch.ones(101)})
    assert torch.equal(made.worker_state()["residual"], torch.ones(101))
    for _ in range(2):
        gradient = torch.zeros(101)
        made.prepare(gradient, copy)
        made.sync(gradient, copy)
        torch.testing.assert_close(made.optimizer.parameters, START - 0.1)
    assert "residual" not in made.worker_state()


def test_gradients_owed_when_workers_begin_to_optimize_are_in_their_first_update() -> None:
    made, copy = server(transports([0])[0], SGD, exchanges_updates=True), START.clone()
    made.load_worker_state({"residual": torch.ones(101)})
    assert torch.equal(made.worker_state()["residual"], torch.ones(101))
    for _ in range(2):
        update = torch.zeros(101)
        made.prepare(update, copy)
        made.sync(update, copy)
        torch.testing.assert_close(copy, START - 0.1)
    assert "residual" not in made.worker_state()


def test_a_bundle_is_one_update_by_the_mean_and_a_rest_of_it_is_not_lost() -> None:
    made, copy = server(transports([0])[0], bundle=2), START.clone()
    one, two, three = gradients(3)
    made.sync(one.clone(), copy)
    assert torch.equal(copy, START)
    made.sync(two.clone(), copy)
    torch.testing.assert_close(copy, sequential([(one + two) / 2]))
    made.sync(three.clone(), copy)
    made.refresh(copy)
    torch.testing.assert_close(copy, sequential([(one + two) / 2, three]))


def test_with_the_optimizer_at_the_worker_one_worker_is_the_same_as_alone() -> None:

    made, copy = server(transports([0])[0], ADAM, exchanges_updates=True), START.clone()
    given = gradients(5)
    for gradient in given:
        update = gradient.clone()
        made.prepare(update, copy)
        made.sync(update, copy)
    torch.testing.assert_close(copy, sequential(given))


def test_a_rate_that_decays_for_want_of_progress_does_so_at_the_worker_too() -> None:
    made, copy = server(transports([0])[0], dataclasses.replace(SGD, stall_factor=0.5), exchanges_updates=True), START.clone()
    for _ in range(2):
        update = torch.ones(101)
        made.prepare(update, copy)
        made.sync(update, copy)
        made.optimizer.stalled()
    torch.testing.assert_close(copy, START - 0.15)


def test_one_channel_lets_one_rank_of_a_node_exchange_at_a_time() -> None:
    active, most = [0, 0], [0, 0]

    class Watched(ParameterServer):
        def sync(self, gradient: Tensor, parameters: Tensor, weight: int = 1) -> None:
            node = self._transport.nodes[self._transport.rank]
            active[node] += 1
            most[node] = max(most[node], active[node])
            super().sync(gradient, parameters, weight)
            active[node] -= 1

    nodes = [0, 0, 0, 1]
    made = [NodeChannel(Watched(context(transport, START, optimizer=SGD)), transport) for transport in transports(nodes)]
    copies = [START.clone() for _ in nodes]
    together(*(
        lambda rank=rank: [made[rank].sync(torch.ones(101), copies[rank]) for _ in range(30)] for rank in range(4)
    ))  # fmt: skip
    assert most == [1, 1]
    made[0].refresh(copies[0])
    torch.testing.assert_close(copies[0], START - 0.1 * 120, atol=1e-4, rtol=0)


def test_one_node_at_a_time_waits_for_the_answers_of_a_machine_before_it_turns_to_the_next() -> None:
    begun: list[str] = []

    class Watched(ParameterServer):
        def _push(self, rank: int, *given: Any) -> Any:
            begun.append(f"push to {rank}")
            return super()._push(rank, *given)

        def _take_answers(self, ranks: Sequence[int], received: Tensor) -> None:
            super()._take_answers(ranks, received)
            begun.append(f"answers of {list(ranks)}")

    in_turn = ServerConfig(one_node_at_a_time=True)
    made = [Watched(context(its, START, optimizer=ADAM, server=in_turn)) for its in transports([0, 1, 1, 0])]
    copy, given = START.clone(), gradients(2)
    made[2].sync(given[0].clone(), copy)
    assert begun == ["push to 3", "push to 0", "answers of [3, 0]", "push to 1", "answers of [1]"]
    made[2].sync(given[1].clone(), copy)
    assert torch.equal(copy, sequential(given))


def test_devices_of_a_node_join_first_and_all_get_the_answer() -> None:
    nodes = [0, 0, 1]
    all_wires = transports(nodes)
    made = [PerNode(server(transport, SGD), transport, START) for transport in all_wires]
    copies = [START.clone() for _ in nodes]
    made[2].leave_round()
    together(*(lambda rank=rank: made[rank].sync(torch.full((101,), rank + 1.0), copies[rank]) for rank in (0, 1)))
    assert torch.equal(copies[0], copies[1])
    torch.testing.assert_close(copies[0], START - 0.1 * 1.5)
    assert made[0].updates == made[2].updates == 1
    made[1].leave_round()
    made[0].sync(torch.ones(101), copies[0])  # does not wait for a rank that rests
    torch.testing.assert_close(copies[0], START - 0.1 * 2.5)


def test_after_a_failure_a_node_adds_the_shares_of_all_its_devices_local_steps() -> None:
    """Each device keeps what its unsent steps would have added, 1/2 of them, and this is what the next update adds."""
    nodes = [0, 0, 1]

    def created() -> list[PerNode]:
        contexts = [context(its, START, optimizer_at="worker", schedule_updates=True) for its in transports(nodes)]
        return [PerNode(ParameterServer(each), each.transport, START, updates=True) for each in contexts]

    steps = [torch.full((101,), value) for value in (1.0, 2.0, 3.0)]
    kept = [made.rescued() | {"unsent": made.contribution(each)} for made, each in zip(created(), steps, strict=True)]
    resumed, copies = created(), [START.clone() for _ in nodes]
    for made, vectors in zip(resumed, kept, strict=True):
        made.load_worker_state(vectors)
    assert torch.equal(resumed[1].rescued()["unsent"], torch.full((101,), 1.0))
    resumed[2].leave_round()
    together(*(lambda rank=rank: resumed[rank].sync(torch.zeros(101), copies[rank]) for rank in (0, 1)))
    torch.testing.assert_close(copies[0], START + 0.5 + 1.0)
    assert "unsent" not in resumed[1].rescued()


class Slow(SingleRank):
    """An exchange that takes as long as `open` is not set."""

    def __init__(self, transport: MemoryTransport, parameters: Tensor) -> None:
        super().__init__(context(LocalTransport(), parameters, optimizer=SGD))
        self.open, self.given = transport.event(), []

    def sync(self, gradient: Tensor, parameters: Tensor, weight: int = 1) -> None:
        self.open.wait()
        self.given.append(gradient.clone())
        super().sync(gradient, parameters, weight)
        parameters.copy_(self.optimizer.parameters)


def overlapped(local_update: str = "none", **settings: Any) -> tuple[Overlap, Slow, FlatModel]:
    config = OverlapConfig(local_update=local_update, **settings)
    transport, flat = transports([0])[0], FlatModel(Vector(START))
    slow = Slow(transport, flat.parameters.clone())
    summed = BatchConfig(reduction="sum")
    return Overlap(context(transport, flat, optimizer=SGD, overlap=config, batch=summed), slow), slow, flat


def steps(schedule: Overlap, flat: FlatModel, values: Sequence[float]) -> list[bool]:
    done = []
    for value in values:
        flat.gradient += value * schedule.accumulator.add(1)
        done.append(schedule.step())
    return done


def test_while_the_courier_is_away_gradients_add_up_and_are_given_away_as_one() -> None:
    schedule, slow, flat = overlapped()
    assert steps(schedule, flat, [1, 2, 3, 4]) == [True, False, False, False]
    assert torch.equal(flat.parameters, START)
    slow.open.set()
    schedule._idle.wait()
    assert steps(schedule, flat, [5]) == [True]
    torch.testing.assert_close(flat.parameters, START - 0.1, msg="swapped in")
    schedule.drain()
    assert [float(gradient[0]) for gradient in slow.given] == [1, 14]
    torch.testing.assert_close(flat.parameters, START - 1.5)
    assert schedule.steps == {1: 1, 4: 1}


def test_nothing_piles_up_beyond_the_bound() -> None:
    schedule, slow, flat = overlapped(bound=2)
    assert steps(schedule, flat, [1, 1]) == [True, False]
    together(lambda: steps(schedule, flat, [1] * 7), slow.open.set)
    schedule.drain()
    assert max(schedule.steps) <= 2
    assert sum(count * times for count, times in schedule.steps.items()) == 9


def test_draining_gives_away_what_has_piled_up_and_takes_the_answer() -> None:
    schedule, slow, flat = overlapped()
    steps(schedule, flat, [1, 1, 1])
    together(schedule.drain, slow.open.set)
    torch.testing.assert_close(flat.parameters, START - 0.3)
    assert not flat.gradient.any()


def test_local_updates_by_the_sum_are_laid_over_what_is_swapped_in() -> None:
    schedule, slow, flat = overlapped(local_update="sum")
    slow.open.set()
    steps(schedule, flat, [1])
    torch.testing.assert_close(flat.parameters, START - 0.1)
    schedule._idle.wait()
    steps(schedule, flat, [1])
    torch.testing.assert_close(flat.parameters, START - 0.2, msg="0.1 came back, 0.1 was applied here")
    schedule.drain()
    torch.testing.assert_close(flat.parameters, START - 0.2, msg="and counts once in the end")


def test_a_local_optimizer_steps_by_each_new_gradient_in_between() -> None:
    schedule, _, flat = overlapped(local_update="optimizer")
    steps(schedule, flat, [1, 2, 3])
    torch.testing.assert_close(flat.parameters, START - 0.1 * (2 + 3))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_sum_that_is_not_finite_is_dropped_and_told(bad: float) -> None:
    schedule, slow, flat = overlapped()
    slow.open.set()
    flat.gradient += bad * schedule.accumulator.add(1)
    with pytest.raises(NotFinite):
        schedule.step()
    steps(schedule, flat, [1])
    schedule.drain()
    assert [float(gradient[0]) for gradient in slow.given] == [1]
    torch.testing.assert_close(flat.parameters, START - 0.1)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_local_optimizer_drops_a_sum_that_is_not_finite_and_steps_on(bad: float) -> None:
    schedule, slow, flat = overlapped(local_update="optimizer")
    steps(schedule, flat, [1, 2])
    flat.gradient += bad * schedule.accumulator.add(1)
    with pytest.raises(NotFinite):
        schedule.step()
    torch.testing.assert_close(flat.parameters, START - 0.1 * 2)
    steps(schedule, flat, [3])
    torch.testing.assert_close(flat.parameters, START - 0.1 * (2 + 3))
    together(schedule.drain, slow.open.set)
    assert [float(gradient[0]) for gradient in slow.given] == [1, 3]


def test_an_error_of_the_courier_is_raised_at_the_next_step() -> None:
    schedule, slow, flat = overlapped()
    slow.optimizer = None
    slow.open.set()
    with pytest.raises(AttributeError):
        for _ in itertools.count():
            steps(schedule, flat, [1])
            schedule._wait()


def test_a_courier_that_has_failed_is_noticed_although_nothing_bounds_its_absence() -> None:
    schedule, slow, flat = overlapped()
    steps(schedule, flat, [1])
    slow.optimizer = None
    slow.open.set()
    with pytest.raises(AttributeError):
        schedule._task.result()
    with pytest.raises(AttributeError):
        steps(schedule, flat, [1])


def test_an_accumulation_that_is_drained_is_given_away_as_it_is() -> None:
    flat = FlatModel(Vector(START))
    built_from = context(LocalTransport(), flat, optimizer=SGD, batch=BatchConfig(accumulate=4))
    schedule = EveryStep(built_from, SingleRank(built_from))
    given = []
    for value in (1.0, 3.0):
        flat.gradient.add_(value, alpha=schedule.accumulator.add(1))
        given.append(schedule.step())
    schedule.drain()
    assert given == [False, False]
    torch.testing.assert_close(flat.parameters, START - 0.1 * 2)  # their mean
    assert not flat.gradient.any()
    schedule.drain()
    assert schedule.exchange.updates == 1


@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_one_worker_in_every_mode_is_as_good_as_alone(overlapping: bool, sparse: bool) -> None:
    flat = FlatModel(Vector(START))
    transport = transports([0])[0]
    made, built_from = server(transport, sparse=sparse), context(transport, flat, optimizer=ADAM)
    schedule = Overlap(built_from, made) if overlapping else EveryStep(built_from, made)
    given = gradients(6)
    for gradient in given:
        flat.gradient += gradient * schedule.accumulator.add(1)
        schedule.step()
        schedule.drain()
    assert torch.equal(flat.parameters, sequential(given))


def test_with_local_updates_one_overlapped_worker_is_alone_and_goes_on_from_a_checkpoint_as_if_uninterrupted() -> None:
    """What was received lacks the newest gradient alone, and the local update adds just that."""
    given = gradients(8)

    def fresh() -> tuple[Overlap, FlatModel]:
        flat, transport = FlatModel(Vector(START)), transports([0])[0]
        return Overlap(context(transport, flat, optimizer=ADAM), server(transport)), flat

    schedule, flat = fresh()
    for count, gradient in enumerate(given, 1):
        flat.gradient += gradient * schedule.accumulator.add(1)
        schedule.step()
        schedule._idle.wait()
        torch.testing.assert_close(flat.parameters, sequential(given[:count]))
    schedule.drain()
    worker_state = schedule.worker_state()
    assert {"local.exp_avg", "local.exp_avg_sq", "local.step"} <= set(worker_state)
    other, _ = fresh()
    other.load_worker_state(worker_state)
    assert all(torch.equal(vector, other.worker_state()[name]) for name, vector in worker_state.items())
