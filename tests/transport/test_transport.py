"""What transports promise: contents and order of messages, ends of waits, one clock."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory import MemoryTransport, together, transports

from nmt_train.common.message import DTYPES, Message, from_json, to_json
from nmt_train.transport import Aborted, Ended, Lost, Tag
from nmt_train.transport.local import LocalTransport
from nmt_train.transport.mpi.framing import SLOTS, contents, pack, unpack
from nmt_train.transport.mpi.rendezvous import answer_pings, measure_offset, rendezvous
from nmt_train.transport.mpi.requests import Slots
from nmt_train.transport.mpi.torch_group import Group

TENSORS = st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 20)), max_size=4)


@settings(max_examples=100)
@given(
    tag=st.sampled_from(Tag),
    numbers=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
    tensors=TENSORS,
    slot=st.booleans(),
)
def test_a_frame_holds_the_whole_message(
    tag: Tag, numbers: list[int], tensors: list[tuple[torch.dtype, int]], slot: bool
) -> None:
    message = Message(tuple(numbers), tuple(torch.arange(size).to(dtype) for dtype, size in tensors))
    found, at, read = unpack(pack(tag, 17 * slot, message), "rank 1", 1 << 20, frozenset(Tag))
    assert (found, at, read.numbers) == (tag, 17 * slot, message.numbers)
    assert [(tensor.dtype, tensor.shape) for tensor in read.tensors] == [(t.dtype, t.shape) for t in message.tensors]
    if slot:  # long contents come by themselves
        for part, original in zip(contents(read), contents(message), strict=True):
            part[:] = original
    assert all(torch.equal(left, right) for left, right in zip(read.tensors, message.tensors, strict=True))


def test_a_message_knows_its_size() -> None:
    assert Message((1, 2), (torch.zeros(3), torch.zeros(5, dtype=torch.uint8))).bytes == 12 + 5
    assert to_json(from_json({"a": [1, "ü"]})) == {"a": [1, "ü"]}


def test_messages_of_a_sender_and_tag_keep_their_order_and_others_do_not_get_in_between() -> None:
    left, right, third = transports([0, 0, 1])
    for number in range(3):
        left.send(1, Tag.PUSH, Message((number,)))
        third.send(1, Tag.PUSH, Message((10 + number,)))
        left.send(1, Tag.ANSWER, Message((20 + number,), (torch.zeros(2),)))
    assert [right.receive(2, Tag.PUSH).result()[1].numbers[0] for _ in range(3)] == [10, 11, 12]
    assert [right.receive(None, Tag.PUSH).result() for _ in range(3)] == [(0, Message((number,))) for number in range(3)]
    assert [right.receive(0, Tag.ANSWER).result()[1].numbers[0] for _ in range(3)] == [20, 21, 22]
    assert right.received[Tag.PUSH] == [6, 0]
    assert left.sent[Tag.ANSWER] == [3, 24]


@pytest.mark.slow
def test_whoever_waits_is_woken_when_the_wire_closes_or_a_task_fails() -> None:
    transport = LocalTransport()
    waiting = transport.receive(None, Tag.PUSH)
    task = transport.spawn("server", lambda: transport.receive(None, Tag.ANSWER).result())
    transport.close()
    for wait in (waiting.result, task.result, transport.event().wait):
        with pytest.raises(Aborted):
            wait()
    broken = LocalTransport()
    failing = broken.spawn("server", lambda: 1 // 0)
    for wait in (failing.result, broken.receive(None, Tag.PUSH).result, broken.event().wait):
        with pytest.raises(ZeroDivisionError):
            wait()


def test_whoever_waits_for_a_task_that_timed_out_is_told() -> None:
    """In Python, the error of the wait and that of the operating system are the same class."""

    def task() -> None:
        raise TimeoutError(110, "Connection timed out")

    waiting = LocalTransport().spawn("late", task)
    with pytest.raises(TimeoutError, match="Connection timed out"):
        waiting.result()


def test_clocks_of_two_hosts_are_aligned_by_the_quickest_round_trip() -> None:
    class Late(MemoryTransport):
        def now(self) -> float:
            return super().now() - 1000.0

    made: list[MemoryTransport] = []
    made += [MemoryTransport(0, [0, 1], made), Late(1, [0, 1], made)]
    _, offset = together(lambda: answer_pings(made[0], 1, 60.0), lambda: measure_offset(made[1], 60.0))
    assert offset == pytest.approx(1000.0, abs=0.05)


@pytest.mark.slow
def test_a_rank_that_stops_while_clocks_are_aligned_is_named() -> None:
    first, second = transports((0, 1))
    with pytest.raises(Lost, match=r"rank 1 of 2 did not connect within 0.1 s \(transport.start_deadline\)"):
        answer_pings(first, 1, 0.1)
    with pytest.raises(Lost, match="rank 0 of 2 did not connect within 0.05 s"):
        measure_offset(second, 0.05)


def test_a_rank_that_has_ended_is_not_waited_for_while_ranks_connect() -> None:
    first, _ = transports((0, 1))
    first._failure = Ended("another rank's process has ended")
    with pytest.raises(Ended):
        rendezvous(first, 60.0)


def test_a_slow_message_keeps_its_slot_however_many_others_pass_it() -> None:
    slots = Slots()
    slow = slots.take(1)
    seen = set()
    for _ in range(2 * SLOTS):
        slot = slots.take(1)
        seen.add(slot)
        slots.free(1, slot)
    assert slow not in seen
    assert seen <= set(range(1, SLOTS + 1))
    assert slots.take(2) == slow, "another peer's slots are its own"


def test_a_peer_that_takes_nothing_in_is_named() -> None:
    slots = Slots()
    for _ in range(SLOTS):
        slots.take(3)
    with pytest.raises(Lost, match=r"rank 3 receives nothing: .*; look at what it does"):
        slots.take(3)


def test_a_rank_that_ends_while_torch_connects_is_no_error_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object, **options: object) -> None:
        raise RuntimeError("connection closed by peer")

    def ended() -> None:
        raise Ended("another rank's process has ended")

    monkeypatch.setattr(torch.distributed, "init_process_group", refused)
    first, _ = transports((0, 0))
    with pytest.raises(Ended):
        Group(first, "cpu", 5.0, ended)
