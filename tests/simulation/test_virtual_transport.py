"""The virtual transport by itself: its clock, what is shared, what waits, what goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Make
from hypothesis import given
from hypothesis import strategies as st
from virtual import BANDWIDTH, LATENCY, cluster, engine, together

from nmt_train.common.errors import UserError
from nmt_train.common.message import Message
from nmt_train.simulation.cluster import Crash, Cut, Kill, LinkConfig, Straggler
from nmt_train.simulation.timing import measure
from nmt_train.simulation.virtual_transport import VirtualTransport
from nmt_train.transport import Aborted, Ended, Lost, Tag


def load(size: int) -> Message:
    return Message((), (torch.zeros(size, dtype=torch.uint8),))


def idle(transport: VirtualTransport) -> None:
    """A rank that does nothing."""


def arrival(transport: VirtualTransport, source: int | None = None, tag: Tag = Tag.PUSH) -> float:
    transport.receive(source, tag).result()
    return transport.now()


def test_a_message_takes_its_size_by_the_bandwidth_and_then_the_latency() -> None:
    def send(transport: VirtualTransport) -> float:
        transport.send(1, Tag.PUSH, load(3000)).result()
        return transport.now()

    assert together(engine([1, 1]), send, arrival) == [3.0, 3.0 + LATENCY]


def test_transfers_out_of_a_card_share_it_and_what_ends_leaves_its_share_to_the_others() -> None:
    def send(transport: VirtualTransport) -> None:
        transport.send(1, Tag.PUSH, load(1000))
        transport.send(2, Tag.PUSH, load(3000))

    # Half of the card each until 2 s, when the first is through; then the second has all of it for its last 2000 bytes.
    assert together(engine([1, 1, 1]), send, arrival, arrival)[1:] == [2 + LATENCY, 4 + LATENCY]


def test_transfers_into_a_card_share_it_and_both_directions_are_apart() -> None:
    def send_and_wait(transport: VirtualTransport) -> float:
        transport.send(2, Tag.PUSH, load(1000))
        return arrival(transport, 2)

    def both(transport: VirtualTransport) -> float:
        transport.send(0, Tag.PUSH, load(1000))
        transport.send(1, Tag.PUSH, load(1000))
        return max(arrival(transport, 0), arrival(transport, 1))

    assert together(engine([1, 1, 1]), send_and_wait, send_and_wait, both) == [2 + LATENCY] * 3


def test_devices_of_one_machine_talk_without_its_card() -> None:
    fast = LinkConfig("2 kB/s", "0s")

    def send(transport: VirtualTransport) -> None:
        transport.send(1, Tag.PUSH, load(2000))
        transport.send(2, Tag.PUSH, load(2000))

    # The device's own connection is not what the card is: each has its whole width.
    times = together(engine([2, 1], inside=fast), send, arrival, arrival)
    assert times[1:] == [1.0, 2 + LATENCY]


def test_messages_between_machines_are_copied_through_the_memory_of_both() -> None:
    inside = LinkConfig("1 GB/s", "0s")

    def send(transport: VirtualTransport) -> float:
        transport.send(1, Tag.PUSH, load(2000))
        return float(transport.send(2, Tag.PUSH, load(2000)).result() or transport.now())

    # To another machine: 0.5 s to the memory of the machine, 2 s over the network, 0.5 s to the device. Inside: no copies.
    times = together(engine([2, 1], inside=inside, host="4 kB/s"), send, arrival, arrival)
    assert times == [2.5, 2e-6, 3 + LATENCY]


def test_copies_to_a_machines_memory_share_its_bus() -> None:
    def send(transport: VirtualTransport) -> None:
        transport.send(2, Tag.PUSH, load(1000))

    # Two copies of 1,000 bytes share the bus for 1 s, both transfers the card for 2 s, and two copies the other bus.
    cluster = engine([2, 1], host="4 kB/s", bus="2 kB/s")
    assert together(cluster, send, send, lambda its: (arrival(its), arrival(its))[1])[2] == 1 + 2 + LATENCY + 1


def served(transport: VirtualTransport) -> None:
    """Answer three pushes."""
    for _ in range(3):
        worker, _ = transport.receive(None, Tag.PUSH).result()
        transport.spend("forward", 1)
        transport.send(worker, Tag.ANSWER, load(1000))


def test_a_machine_with_one_server_thread_serves_one_worker_after_the_other() -> None:
    def one(transport: VirtualTransport) -> float:
        transport.send(1, Tag.PUSH, load(1000))
        return arrival(transport, 1, Tag.ANSWER)

    def two(transport: VirtualTransport) -> float:
        """The second push is of the same turn."""
        for _ in range(2):
            transport.send(1, Tag.PUSH, load(1000))
        return max(arrival(transport, 1, Tag.ANSWER) for _ in range(2))

    # Each push and answer takes 1 s, and the work on it 1 s.
    alone = 3 + 2 * LATENCY
    together_at_once = together(engine([1, 1, 1]), one, served, two)
    in_turn = together(engine([1, 1, 1], one_client_at_a_time=True), one, served, two)
    assert in_turn[0] == alone < together_at_once[0]
    assert in_turn[2] == alone + 4 + LATENCY


def test_an_answer_of_before_a_regroup_ends_no_turn_of_afterwards() -> None:
    def until_regrouped(transport: VirtualTransport, begin: Callable[[], object]) -> VirtualTransport:
        with pytest.raises(Ended):
            begin()
            transport.receive(3, Tag.REPORT).result()  # that rank ends
        return transport.regroup()

    def server(transport: VirtualTransport) -> None:
        def answer() -> None:
            worker, _ = transport.receive(None, Tag.PUSH).result()
            transport.send(worker, Tag.ANSWER, load(5000))  # leaves after the regroup

        transport = until_regrouped(transport, answer)
        for _ in range(6):
            worker, _ = transport.receive(None, Tag.PUSH).result()
            transport.send(worker, Tag.ANSWER, load(1000))

    def client(transport: VirtualTransport) -> int:
        began = transport.rank == 0
        transport = until_regrouped(transport, lambda: began and transport.send(1, Tag.PUSH, load(1000)))
        for _ in range(10):
            transport.spend("forward", 1)  # until the old answer has left
        for _ in range(3):
            transport.send(1, Tag.PUSH, load(1000))
            transport.receive(1, Tag.ANSWER).result()
        return 3

    def ends(transport: VirtualTransport) -> None:
        transport.receive(0, Tag.REPORT).result()

    room = engine([1, 1, 1, 1], one_client_at_a_time=True, kills=[Kill(3, "2.5s")])
    assert together(room, client, server, client, ends) == [3, None, 3]


def test_turns_cannot_be_combined_with_rounds(make: Make) -> None:
    rooms = cluster([1, 1, 1], one_client_at_a_time=True)
    with pytest.raises(UserError, match="one_client_at_a_time: .* set --cluster.one_client_at_a_time false"):
        measure(make(mode="vanilla", server__rule="rounds"), rooms, [(100,)], [10], 8)
    assert measure(make(mode="vanilla"), rooms, [(100,)], [10], 8).words_per_second


def test_tasks_of_a_rank_compete_for_its_device_and_stragglers_are_slower() -> None:
    def work(transport: VirtualTransport) -> float:
        other = transport.spawn("server", lambda: transport.spend("forward", 1))
        transport.spend("backward", 1)
        other.result()
        return transport.now()

    # One second and two: half a device each until 2 s, and the other's last second alone.
    assert together(engine([1, 1], stragglers=[Straggler(1, 3.0)]), work, work) == [3.0, 9.0]


def test_messages_of_one_kind_arrive_in_order_also_when_the_first_is_longer() -> None:
    def send(transport: VirtualTransport) -> None:
        for number, size in enumerate((5000, 10, 1000)):
            transport.send(1, Tag.PUSH, Message((number,), load(size).tensors))
        transport.send(1, Tag.ANSWER, Message((9,)))

    def receive(transport: VirtualTransport) -> list[int]:
        first = transport.receive(0, Tag.ANSWER).result()[1].numbers[0]
        return [first, *(transport.receive(0, Tag.PUSH).result()[1].numbers[0] for _ in range(3))]

    assert together(engine([1, 1]), send, receive)[1] == [9, 0, 1, 2]


@given(seed=st.integers(0, 10_000), loss=st.sampled_from([0.0, 0.3]))
def test_whatever_the_order_of_delivery_no_message_is_lost_or_doubled(seed: int, loss: float) -> None:
    def talk(transport: VirtualTransport) -> list[tuple[int, int]]:
        for number in range(4):
            for rank in range(transport.size):
                transport.send(rank, Tag.PUSH, Message((number,), load(100 * number).tensors))
        mail = [transport.receive(None, Tag.PUSH).result() for _ in range(4 * transport.size)]
        return [(source, message.numbers[0]) for source, message in mail]

    for got in together(engine([2, 1], shuffle_seed=seed, loss=loss), talk, talk, talk):
        assert sorted(got) == [(source, number) for source in range(3) for number in range(4)]
        for source in range(3):
            assert [number for its, number in got if its == source] == [0, 1, 2, 3]


def test_what_is_sent_may_be_overwritten_at_once() -> None:
    def send(transport: VirtualTransport) -> None:
        vector = torch.ones(3)
        transport.send(1, Tag.PUSH, Message((), (vector,)))
        vector.zero_()

    received = together(engine([1, 1]), send, lambda transport: transport.receive(0, Tag.PUSH).result()[1].tensors[0])[1]
    assert received.tolist() == [1, 1, 1]


def test_every_rank_has_its_own_random_numbers_and_every_task_its_own_gradient_mode() -> None:
    def draw(transport: VirtualTransport) -> list[float]:
        torch.manual_seed(transport.rank)

        @torch.no_grad()
        def beside() -> None:
            transport.spend("forward", 1)
            assert not torch.is_grad_enabled()

        transport.spawn("beside", beside)
        numbers = []
        for _ in range(3):
            numbers.append(float(torch.rand(())))
            transport.spend("forward", 1)
            assert torch.is_grad_enabled()
        return numbers

    expected = []
    for rank in range(2):
        torch.manual_seed(rank)
        expected.append([float(torch.rand(())) for _ in range(3)])
    assert together(engine([2]), draw, draw) == expected


def test_a_lock_is_given_in_the_order_of_asking() -> None:
    order = []

    def work(transport: VirtualTransport) -> None:
        lock = transport.lock()

        def hold(name: str) -> None:
            with lock:
                transport.spend("forward", 1)
                order.append((name, transport.now()))

        for task in [transport.spawn(name, lambda name=name: hold(name)) for name in "abc"]:
            task.result()

    together(engine([1]), work)
    assert order == [("a", 1.0), ("b", 2.0), ("c", 3.0)]


def test_waiting_for_ever_is_an_error_that_says_what_every_task_waits_for() -> None:
    def wait(transport: VirtualTransport) -> None:
        transport.spawn("server", lambda: transport.receive(None, Tag.PUSH).result())
        transport.receive(1, Tag.ANSWER).result()

    with pytest.raises(UserError) as error:
        together(engine([1, 1]), wait, idle)
    text = str(error.value)
    assert "all tasks wait forever" in text
    assert "rank 0 (host node0), MainThread: ANSWER from rank 1 (host node1)" in text
    assert "rank 0 (host node0), server: PUSH from anybody" in text


def test_an_error_of_one_rank_ends_the_others_and_is_the_one_that_is_raised() -> None:
    seen: list[BaseException] = []

    def fail(transport: VirtualTransport) -> None:
        transport.spend("forward", 1)
        raise UserError("disk full")

    def wait(transport: VirtualTransport) -> None:
        try:
            arrival(transport)
        except Aborted as error:
            seen.append(error)
            raise

    with pytest.raises(UserError, match="disk full"):
        together(engine([1, 1, 1]), wait, fail, wait)
    assert len(seen) == 2


def test_closing_a_wire_ends_the_tasks_that_wait_on_it() -> None:
    ends: list[Any] = []

    def close(transport: VirtualTransport) -> None:
        def serve() -> None:
            try:
                transport.receive(None, Tag.PUSH).result()
            except Aborted as error:
                ends.append(error)
                raise

        transport.spawn("server", serve)
        transport.spend("forward", 1)
        transport.close()

    together(engine([1]), close)
    assert len(ends) == 1


def test_a_cut_network_moves_nothing_until_it_is_back() -> None:
    def send(transport: VirtualTransport) -> None:
        transport.send(1, Tag.PUSH, load(2000))

    assert together(engine([1, 1], cuts=[Cut(1, "1s", "31s")]), send, arrival)[1] == 32 + LATENCY


@pytest.mark.parametrize("trouble", [{"crashes": [Crash(1, "1s")]}, {"cuts": [Cut(1, "1s", "100s")]}])
def test_a_machine_that_is_gone_for_longer_than_the_deadline_is_given_up_by_name(trouble: dict[str, Any]) -> None:
    def wait(transport: VirtualTransport) -> None:
        arrival(transport, 1)

    def late(transport: VirtualTransport) -> None:
        transport.spend("backward", 1)
        transport.send(0, Tag.PUSH, load(10))

    room = engine([1, 1], **trouble)
    with pytest.raises(Lost, match=r"rank 1 \(host node1\) has been silent for 60 s"):
        together(room, wait, late)
    assert room.transports[0].now() == 61.0


def test_bandwidth_is_that_of_the_file() -> None:
    assert engine([1]).network.cluster.network.bandwidth == BANDWIDTH
