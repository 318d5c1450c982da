"""The parameter server, its shards, and the strategies of its workers, with several ranks in one process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest
import torch
from contexts import alone, client, context
from memory import MemoryTransport, together, transports
from torch import Tensor

from nmt_train.codec.config import DroppingConfig
from nmt_train.common.errors import NotFinite
from nmt_train.corpus import BatchConfig
from nmt_train.modes.table import Server
from nmt_train.optim.config import OptimizerConfig
from nmt_train.optim.flat_model import FlatModel
from nmt_train.server.client import Client
from nmt_train.server.every_step import EveryStep
from nmt_train.server.overlap import Overlap
from nmt_train.strategy.config import OverlapConfig, ServerConfig
from nmt_train.strategy.context import BuildContext
from nmt_train.strategy.plan import EVERY_STEP, LOCAL_STEPS, ServerPlan
from nmt_train.strategy.state import WorkerState
from nmt_train.transport.local import LocalTransport

ADAM = OptimizerConfig(name="adam", learning_rate=0.1, schedule="constant", warmup=0, clip_norm=0)
SGD = OptimizerConfig(name="sgd", learning_rate=0.1, schedule="constant", warmup=0, clip_norm=0)
DROPPING = DroppingConfig(up=0.9, down=0.9, values="fp32")
T = TypeVar("T", EveryStep, Overlap)
START = torch.linspace(-1, 1, 101)


def server(
    transport: MemoryTransport,
    optimizer: OptimizerConfig = ADAM,
    sparse: bool = False,
    sends_updates: bool = False,
    kind: type[Client] = Client,
    **settings: Any,
) -> Client:
    codec, at = "top-k" if sparse else "dense", "worker" if sends_updates else "shard"
    row = Server(EVERY_STEP, codec, codec, optimizer=at)
    made_of = context(transport, START, row, optimizer=optimizer, server=ServerConfig(**settings), dropping=DROPPING)
    return client(made_of, kind=kind)


def gradients(count: int, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(len(START)) for _ in range(count)]


def sequential(given: Sequence[Tensor], optimizer: OptimizerConfig = ADAM) -> Tensor:
    made = alone(LocalTransport(), START, optimizer)
    for gradient in given:
        made._flat.gradient += gradient * made.accumulator.add(1)
        made.step()
    return made.optimizer.parameters


@pytest.mark.parametrize(("nodes", "sparse"), [((0,), False), ((0, 1), False), ((0, 0, 0, 1), False), ((0,), True)])
def test_pushes_in_a_fixed_order_are_the_sequential_result(nodes: tuple[int, ...], sparse: bool) -> None:
    """Bit for bit where all is sent, or nothing needs to be."""
    servers = [server(transport, sparse=sparse) for transport in transports(nodes)]
    copies = [START.clone() for _ in nodes]
    given = gradients(7)
    for turn, gradient in enumerate(given):
        rank = turn % len(nodes)
        servers[rank].exchange(gradient.clone(), copies[rank], 1)
    last = (len(given) - 1) % len(nodes)
    assert torch.equal(copies[last], sequential(given))
    assert all(made.updates == 7 for made in servers)


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_ranks_without_a_shard_take_part_and_know_how_many_updates_there_were(shards: int) -> None:
    servers = [server(transport, shards=shards) for transport in transports([0, 0, 1, 1])]
    copies = [START.clone() for _ in servers]
    given = gradients(8)
    for turn, gradient in enumerate(given):
        servers[turn % 4].exchange(gradient.clone(), copies[turn % 4], 1)
    assert torch.equal(copies[3], sequential(given))
    assert servers[3].updates == 8
    for made, copy in zip(servers, copies, strict=True):
        made.refresh(copy)
        assert torch.equal(copy, copies[3])
        assert made.updates == 8
    assert sum(made.optimizer.parameters.numel() > 0 for made in servers) == shards


@pytest.mark.parametrize("bypass", ["device", "none"])
def test_a_bypassed_shard_gets_and_gives_the_same_as_one_over_the_wire(bypass: str) -> None:
    made, copy = server(transports([0])[0], bypass=bypass), START.clone()
    given = gradients(4)
    for gradient in given:
        made.exchange(gradient.clone(), copy, 1)
    assert torch.equal(copy, sequential(given))
    assert bool(made._transport.sent) is (bypass == "none")


def test_every_push_counts_whatever_the_order() -> None:
    """Plain gradient descent only adds up, so that the order of asynchronous pushes must not matter."""
    servers = [server(transport, SGD) for transport in transports([0, 0, 1])]
    given = [gradients(20, seed) for seed in range(3)]
    copies = [START.clone() for _ in given]

    def worker(rank: int) -> None:
        for gradient in given[rank]:
            servers[rank].exchange(gradient.clone(), copies[rank], 1)

    together(*(lambda rank=rank: worker(rank) for rank in range(3)))
    for made, copy in zip(servers, copies, strict=True):
        made.refresh(copy)
        torch.testing.assert_close(copy, START - 0.1 * sum(map(sum, given)), atol=1e-4, rtol=0)
        assert made.updates == 60
        assert sum(made.service.staleness.values()) == 60


def test_staleness_is_what_others_have_pushed_since_the_worker_last_heard() -> None:
    left, right = (server(transport) for transport in transports([0, 1]))
    a, b = START.clone(), START.clone()
    left.exchange(torch.ones(101), a, 1)
    left.exchange(torch.ones(101), a, 1)
    right.exchange(torch.ones(101), b, 1)  # has seen neither
    left.exchange(torch.ones(101), a, 1)
    assert dict(left.service.staleness) == dict(right.service.staleness) == {0: 2, 2: 1, 1: 1}


def test_an_overlapped_gradient_is_of_the_parameters_before_the_last_answer() -> None:
    transport, copy = transports([0])[0], START.clone()
    made = client(context(transport, START, optimizer=SGD), max_in_flight=1)
    for _ in range(4):
        made.exchange(torch.ones(101), copy, 1)
    assert dict(made.service.staleness) == {0: 1, 1: 3}


def test_sparse_workers_and_shards_agree_on_what_was_sent_and_owe_the_rest() -> None:
    left, right = (server(transport, SGD, sparse=True, bypass="none") for transport in transports([0, 1]))
    copy, other = START.clone(), START.clone()
    left.refresh(copy)
    right.refresh(other)
    given = gradients(5)
    for gradient in given:
        left.exchange(gradient.clone(), copy, 1)
    assert torch.equal(torch.cat([made.service._shard._held[0] for made in (left, right)]), copy)
    owed = left.state(copy).residual
    parameters = torch.cat([made.optimizer.parameters for made in (left, right)])
    torch.testing.assert_close(parameters, START - 0.1 * (sum(given) - owed), atol=1e-6, rtol=0)
    left.refresh(copy)
    assert torch.equal(copy, parameters)


@pytest.mark.parametrize("sends_updates", [False, True])
def test_inside_a_machine_nothing_is_dropped(sends_updates: bool) -> None:
    """Thesis 4.2.2. Workers 0 and 1 share a machine: of their slices, each has the exact parameters; worker 2 has deltas."""
    made = [server(its, SGD, True, sends_updates, bypass="node") for its in transports([0, 0, 1])]
    copies = [START.clone() for _ in made]
    for its, copy in zip(made, copies, strict=True):
        its.refresh(copy)
    given = gradients(6)
    for turn, gradient in enumerate(given):
        its, copy = made[turn % 3], copies[turn % 3]
        its.prepare(gradient, copy, 1)
        its.exchange(gradient, copy, 1)
        if turn % 3 < 2:
            inside = slice(0, made[1].shards[1].stop)
            assert torch.equal(copy[inside], torch.cat([made[0].optimizer.parameters, made[1].optimizer.parameters]))
    assert [set(its.service._shard._held) for its in made] == [{2}, {2}, {0, 1}]
    unsent = [its.state(copy) for its, copy in zip(made, copies, strict=True)]
    owed = [state.unsent if sends_updates else state.residual for state in unsent]
    assert not owed[0][inside].any()
    assert owed[0].any()
    for its, copy in zip(made, copies, strict=True):
        its.refresh(copy)
    sent = sum(owed) if sends_updates else -0.1 * sum(owed)
    torch.testing.assert_close(copies[0], START - 0.1 * sum(gradients(6)) - sent, atol=1e-6, rtol=0)


def test_residuals_of_a_shard_that_is_now_bypassed_are_not_lost() -> None:
    made, copy = server(transports([0])[0], SGD, sparse=True), START.clone()
    made.load(WorkerState(residual=torch.ones(101)))
    made.exchange(torch.zeros(101), copy, 1)
    torch.testing.assert_close(copy, START - 0.1)
    made.exchange(torch.zeros(101), copy, 1)
    torch.testing.assert_close(copy, START - 0.1)


def test_what_another_mode_owed_is_given_once_and_saved_until_then() -> None:
    made, copy = server(transports([0])[0], SGD), START.clone()
    made.load(WorkerState(residual=torch.ones(101)))
    assert torch.equal(made.state(copy).residual, torch.ones(101))
    for _ in range(2):
        gradient = torch.zeros(101)
        made.prepare(gradient, copy, 1)
        made.exchange(gradient, copy, 1)
        torch.testing.assert_close(made.optimizer.parameters, START - 0.1)
    assert made.state(copy).residual is None


@pytest.mark.parametrize("sends_updates", [False, True])
def test_what_another_mode_owed_outlives_a_push_that_is_not_finite(sends_updates: bool) -> None:
    """Of rank 0, half is owed to its own shard, which no codec keeps. As an update, it is what SGD makes of the residual."""
    left, right = (server(its, SGD, sparse=True, sends_updates=sends_updates) for its in transports([0, 1]))
    copy = START.clone()
    for made in (right, left):
        made.refresh(copy)
    left.load(WorkerState(residual=torch.ones(101)))
    left.prepare(gradient := torch.zeros(101), copy, 1)
    gradient[0] = torch.inf
    with pytest.raises(NotFinite):
        left.exchange(gradient, copy, 1)
    assert torch.equal(left.state(copy).residual, torch.ones(101))
    for _ in range(2):
        left.prepare(gradient := torch.zeros(101), copy, 1)
        left.exchange(gradient, copy, 1)
        torch.testing.assert_close(left.optimizer.parameters, START[:50] - 0.1)


def test_one_rank_applies_what_another_mode_owed_once() -> None:
    made = alone(LocalTransport(), START, SGD)
    made.load(WorkerState(residual=torch.ones(101)))
    assert torch.equal(made.state().residual, torch.ones(101))
    for _ in range(2):
        made.accumulator.add(1)
        made.step()
        torch.testing.assert_close(made.optimizer.parameters, START - 0.1)
    assert made.state().residual is None


def test_gradients_owed_when_workers_begin_to_optimize_are_in_their_first_update() -> None:
    made, copy = server(transports([0])[0], SGD, sends_updates=True), START.clone()
    made.load(WorkerState(residual=torch.ones(101)))
    assert torch.equal(made.state(copy).residual, torch.ones(101))
    for _ in range(2):
        update = torch.zeros(101)
        made.prepare(update, copy, 1)
        made.exchange(update, copy, 1)
        torch.testing.assert_close(copy, START - 0.1)
    assert made.state(copy).residual is None


def test_a_bundle_is_one_update_by_the_mean_and_a_rest_of_it_is_not_lost() -> None:
    made, copy = server(transports([0])[0], bundle=2), START.clone()
    one, two, three = gradients(3)
    made.exchange(one.clone(), copy, 1)
    assert torch.equal(copy, START)
    made.exchange(two.clone(), copy, 1)
    torch.testing.assert_close(copy, sequential([(one + two) / 2]))
    made.exchange(three.clone(), copy, 1)
    made.refresh(copy)
    torch.testing.assert_close(copy, sequential([(one + two) / 2, three]))


def test_with_the_optimizer_at_the_worker_one_worker_is_the_same_as_alone() -> None:

    made, copy = server(transports([0])[0], ADAM, sends_updates=True), START.clone()
    given = gradients(5)
    for gradient in given:
        update = gradient.clone()
        made.prepare(update, copy, 1)
        made.exchange(update, copy, 1)
    torch.testing.assert_close(copy, sequential(given))


def test_one_channel_lets_one_rank_of_a_node_exchange_at_a_time() -> None:
    active, most = [0, 0], [0, 0]

    class Watched(Client):
        def _prepare_push(self, gradient: Tensor) -> None:
            node = self._transport.nodes[self._transport.rank]
            active[node] += 1
            most[node] = max(most[node], active[node])
            super()._prepare_push(gradient)

        def _combine(self, received: Tensor, parameters: Tensor) -> None:
            active[self._transport.nodes[self._transport.rank]] -= 1

    nodes = [0, 0, 0, 1]
    made = [server(transport, SGD, kind=Watched, one_channel_per_node=True) for transport in transports(nodes)]
    copies = [START.clone() for _ in nodes]
    together(*(
        lambda rank=rank: [made[rank].exchange(torch.ones(101), copies[rank], 1) for _ in range(30)] for rank in range(4)
    ))  # fmt: skip
    assert most == [1, 1]
    made[0].refresh(copies[0])
    torch.testing.assert_close(copies[0], START - 0.1 * 120, atol=1e-4, rtol=0)


def test_one_node_at_a_time_waits_for_the_answers_of_a_machine_before_it_turns_to_the_next() -> None:
    begun: list[str] = []

    class Watched(Client):
        def _send(self, rank: int, *given: Any) -> Any:
            begun.append(f"push to {rank}")
            return super()._send(rank, *given)

        def _take_answers(self, ranks: Sequence[int], received: Tensor) -> None:
            super()._take_answers(ranks, received)
            begun.append(f"answers of {list(ranks)}")

    made = [server(its, kind=Watched, one_node_at_a_time=True) for its in transports([0, 1, 1, 0])]
    copy, given = START.clone(), gradients(2)
    made[2].exchange(given[0].clone(), copy, 1)
    assert begun == ["push to 3", "push to 0", "answers of [3, 0]", "push to 1", "answers of [1]"]
    made[2].exchange(given[1].clone(), copy, 1)
    assert torch.equal(copy, sequential(given))


def test_devices_of_a_node_join_first_and_all_get_the_answer() -> None:
    nodes = [0, 0, 1]
    made = [server(transport, SGD, per="node") for transport in transports(nodes)]
    copies = [START.clone() for _ in nodes]
    made[2].leave_round()
    together(*(lambda rank=rank: made[rank].exchange(torch.full((101,), rank + 1.0), copies[rank], 1) for rank in (0, 1)))
    assert torch.equal(copies[0], copies[1])
    torch.testing.assert_close(copies[0], START - 0.1 * 1.5)
    assert made[0].updates == made[2].updates == 1
    made[1].leave_round()
    made[0].exchange(torch.ones(101), copies[0], 1)  # does not wait for a rank that rests
    torch.testing.assert_close(copies[0], START - 0.1 * 2.5)


def test_after_a_failure_a_node_adds_the_shares_of_all_its_devices_local_steps() -> None:
    """Each device keeps what its unsent steps would have added, 1/2 of them, and this is what the next update adds."""
    nodes = [0, 0, 1]

    def created() -> list[Client]:
        per_node, row = ServerConfig(per="node"), Server(LOCAL_STEPS)
        return [client(context(its, START, row, server=per_node)) for its in transports(nodes)]

    steps = [torch.full((101,), value) for value in (1.0, 2.0, 3.0)]
    kept = [WorkerState(unsent=made.contribution(each)) for made, each in zip(created(), steps, strict=True)]
    resumed, copies = created(), [START.clone() for _ in nodes]
    for made, state in zip(resumed, kept, strict=True):
        made.load(state)
    assert torch.equal(resumed[1].state(copies[1]).unsent, torch.full((101,), 1.0))
    resumed[2].leave_round()
    together(*(lambda rank=rank: resumed[rank].exchange(torch.zeros(101), copies[rank], 1) for rank in (0, 1)))
    torch.testing.assert_close(copies[0], START + 0.5 + 1.0)
    assert resumed[1].state(copies[1]).unsent is None


class Slow(Client):
    """Its exchange takes as long as `open` is not set."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.open, self.given, self.error = self._transport.event(), [], ""

    def exchange(self, gradient: Tensor, parameters: Tensor, weight: int) -> None:
        self.open.wait()
        if self.error:
            raise AttributeError(self.error)
        self.given.append(gradient.clone())
        super().exchange(gradient, parameters, weight)


def overlapped(monkeypatch: pytest.MonkeyPatch, local_update: str = "none", **settings: Any) -> tuple[Overlap, Slow, FlatModel]:
    monkeypatch.setattr("nmt_train.server.every_step.Client", Slow)
    overlap, summed = OverlapConfig(local_update=local_update, **settings), BatchConfig(reduction="sum")
    made_of = context(transports([0])[0], START, Server("overlapped"), optimizer=SGD, overlap=overlap, batch=summed)
    made = built(Overlap, made_of)
    return made, made._client, made_of.flat


def arrived(strategy: Overlap) -> None:
    """Wait until the exchange is over, but do not take its result."""
    strategy._background._wait()


def built(kind: type[T], made_of: BuildContext) -> T:
    assert isinstance(made_of.plan.family, ServerPlan)
    return kind(made_of, made_of.plan.family)


def steps(strategy: Overlap, flat: FlatModel, values: Sequence[float]) -> list[bool]:
    done = []
    for value in values:
        flat.gradient += value * strategy.accumulator.add(1)
        done.append(strategy.step())
    return done


def test_while_the_courier_is_away_gradients_add_up_and_are_given_away_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, slow, flat = overlapped(monkeypatch)
    assert steps(strategy, flat, [1, 2, 3, 4]) == [True, False, False, False]
    assert torch.equal(flat.parameters, START)
    slow.open.set()
    arrived(strategy)
    assert steps(strategy, flat, [5]) == [True]
    torch.testing.assert_close(flat.parameters, START - 0.1, msg="swapped in")
    strategy.drain()
    assert [float(gradient[0]) for gradient in slow.given] == [1, 14]
    torch.testing.assert_close(flat.parameters, START - 1.5)
    assert strategy.steps == {1: 1, 4: 1}


def test_nothing_piles_up_beyond_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, slow, flat = overlapped(monkeypatch, bound=2)
    assert steps(strategy, flat, [1, 1]) == [True, False]
    together(lambda: steps(strategy, flat, [1] * 7), slow.open.set)
    strategy.drain()
    assert max(strategy.steps) <= 2
    assert sum(count * times for count, times in strategy.steps.items()) == 9


def test_draining_gives_away_what_has_piled_up_and_takes_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, slow, flat = overlapped(monkeypatch)
    steps(strategy, flat, [1, 1, 1])
    together(strategy.drain, slow.open.set)
    torch.testing.assert_close(flat.parameters, START - 0.3)
    assert not flat.gradient.any()


def test_local_updates_by_the_sum_are_laid_over_what_is_swapped_in(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, slow, flat = overlapped(monkeypatch, local_update="sum")
    slow.open.set()
    steps(strategy, flat, [1])
    torch.testing.assert_close(flat.parameters, START - 0.1)
    arrived(strategy)
    steps(strategy, flat, [1])
    torch.testing.assert_close(flat.parameters, START - 0.2, msg="0.1 came back, 0.1 was applied here")
    strategy.drain()
    torch.testing.assert_close(flat.parameters, START - 0.2, msg="and counts once in the end")


def test_a_local_optimizer_steps_by_each_new_gradient_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, _, flat = overlapped(monkeypatch, local_update="optimizer")
    steps(strategy, flat, [1, 2, 3])
    torch.testing.assert_close(flat.parameters, START - 0.1 * (2 + 3))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_sum_that_is_not_finite_is_dropped_and_told(monkeypatch: pytest.MonkeyPatch, bad: float) -> None:
    strategy, slow, flat = overlapped(monkeypatch)
    slow.open.set()
    flat.gradient += bad * strategy.accumulator.add(1)
    with pytest.raises(NotFinite):
        strategy.step()
    steps(strategy, flat, [1])
    strategy.drain()
    assert [float(gradient[0]) for gradient in slow.given] == [1]
    torch.testing.assert_close(flat.parameters, START - 0.1)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_local_optimizer_drops_a_sum_that_is_not_finite_and_steps_on(monkeypatch: pytest.MonkeyPatch, bad: float) -> None:
    strategy, slow, flat = overlapped(monkeypatch, local_update="optimizer")
    steps(strategy, flat, [1, 2])
    flat.gradient += bad * strategy.accumulator.add(1)
    with pytest.raises(NotFinite):
        strategy.step()
    torch.testing.assert_close(flat.parameters, START - 0.1 * 2)
    steps(strategy, flat, [3])
    torch.testing.assert_close(flat.parameters, START - 0.1 * (2 + 3))
    together(strategy.drain, slow.open.set)
    assert [float(gradient[0]) for gradient in slow.given] == [1, 3]


def test_an_error_of_the_courier_is_raised_at_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, slow, flat = overlapped(monkeypatch)
    slow.error = "broken"
    slow.open.set()
    with pytest.raises(AttributeError):
        for _ in itertools.count():
            steps(strategy, flat, [1])


def test_a_courier_that_has_failed_is_noticed_although_nothing_bounds_its_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, slow, flat = overlapped(monkeypatch)
    steps(strategy, flat, [1])
    slow.error = "broken"
    slow.open.set()
    with pytest.raises(AttributeError):
        strategy._background._task.result()
    with pytest.raises(AttributeError):
        steps(strategy, flat, [1])


def test_an_accumulation_that_is_drained_is_given_away_as_it_is() -> None:
    strategy = alone(LocalTransport(), START, SGD, batch=BatchConfig(accumulate=4))
    flat = strategy._flat
    given = []
    for value in (1.0, 3.0):
        flat.gradient.add_(value, alpha=strategy.accumulator.add(1))
        given.append(strategy.step())
    strategy.drain()
    assert given == [False, False]
    torch.testing.assert_close(flat.parameters, START - 0.1 * 2)  # their mean
    assert not flat.gradient.any()
    strategy.drain()
    assert strategy.updates == 1


@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_one_worker_in_every_mode_is_as_good_as_alone(overlapping: bool, sparse: bool) -> None:
    codec = "top-k" if sparse else "dense"
    row = Server("overlapped" if overlapping else EVERY_STEP, codec, codec)
    made_of = context(transports([0])[0], START, row, optimizer=ADAM, dropping=DROPPING)
    strategy, flat = built(Overlap if overlapping else EveryStep, made_of), made_of.flat
    given = gradients(6)
    for gradient in given:
        flat.gradient += gradient * strategy.accumulator.add(1)
        strategy.step()
        strategy.drain()
    assert torch.equal(flat.parameters, sequential(given))


def test_with_local_updates_one_overlapped_worker_is_alone_and_goes_on_from_a_checkpoint_as_if_uninterrupted() -> None:
    """What was received lacks the newest gradient alone, and the local update adds just that."""
    given = gradients(8)

    def fresh() -> tuple[Overlap, FlatModel]:
        made_of = context(transports([0])[0], START, Server("overlapped"), optimizer=ADAM)
        return built(Overlap, made_of), made_of.flat

    strategy, flat = fresh()
    for count, gradient in enumerate(given, 1):
        flat.gradient += gradient * strategy.accumulator.add(1)
        strategy.step()
        arrived(strategy)
        torch.testing.assert_close(flat.parameters, sequential(given[:count]))
    strategy.drain()
    state = strategy.state()
    assert {"local_optimizer.exp_avg", "local_optimizer.exp_avg_sq", "local_optimizer.step"} <= set(state.own)
    other, _ = fresh()
    other.load(state)
    assert all(torch.equal(vector, other.state().own[name]) for name, vector in state.own.items())
