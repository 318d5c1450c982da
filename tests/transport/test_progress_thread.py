"""The progress thread of rank 0, told by an MPI whose other ranks are the test."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from memory import together
from mpi_in_memory import BEAT, PATIENCE, Comm, World

from nmt_train.common.errors import UserError
from nmt_train.common.message import Malformed, Message
from nmt_train.transport import Aborted, Lost, Tag
from nmt_train.transport.local import LocalFuture
from nmt_train.transport.mpi import progress_thread
from nmt_train.transport.mpi.framing import contents, pack, unpack
from nmt_train.transport.mpi.progress_thread import ABORT
from nmt_train.transport.mpi.requests import SendRequest, SumRequest
from nmt_train.transport.mpi.runtime import CHUNK

LONG = Message((1,), (torch.arange(4 * CHUNK + 8).to(torch.uint8),))  # five pieces
PIECES = [contents(LONG)[0][start : start + CHUNK] for start in range(0, LONG.bytes, CHUNK)]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World()
    clock = SimpleNamespace(monotonic=lambda: made.now, sleep=made.sleep, thread_time=lambda: 0.0)
    monkeypatch.setattr(progress_thread, "time", clock)
    monkeypatch.setattr(progress_thread, "AwakeClock", lambda longest: SimpleNamespace(now=lambda: made.now))
    monkeypatch.setattr(progress_thread, "load", lambda: made.mpi)
    monkeypatch.setattr(progress_thread, "finalize", made.finalize)
    monkeypatch.setattr("nmt_train.transport.local._LOOK", 0.001)
    monkeypatch.setattr("nmt_train.transport.mpi.rendezvous._BOOT", Path("/nowhere"))
    yield made
    for comm in filter(None, (made.comm, made.comm.survivors)):
        comm.broken = UserError("the test is over")
    for thread in made.threads:
        thread.close()


def test_messages_of_a_tag_are_delivered_as_sent_though_a_short_one_overtakes_a_long_one(world: World) -> None:
    world.thread()
    for tag, slot, message in ((Tag.PUSH, 7, LONG), (Tag.PUSH, 0, Message((2,))), (Tag.ANSWER, 0, Message((3,)))):
        world.comm.put(1, pack(tag, slot, message))
    world.comm.put(2, pack(Tag.PUSH, 0, Message((4,))))
    assert world.recipient.next() == (1, Tag.ANSWER, Message((3,)))
    assert world.recipient.next() == (2, Tag.PUSH, Message((4,))), "each sender has an order of its own"
    for piece in PIECES:
        world.comm.put(1, piece, tag=7)
    source, tag, message = world.recipient.next()
    assert (source, tag, message.numbers, message.origin) == (1, Tag.PUSH, LONG.numbers, "rank 1")
    assert torch.equal(message.tensors[0], LONG.tensors[0])
    assert world.recipient.next() == (1, Tag.PUSH, Message((2,)))


@pytest.mark.parametrize(("tag", "at_once"), [(Tag.PUSH, range(5, 6)), (Tag.STATE, range(1, 3))])
def test_a_long_message_is_sent_when_its_last_piece_is_taken_and_state_leaves_room_for_others(
    world: World, tag: Tag, at_once: range
) -> None:
    letter, short = SendRequest(1, tag, LONG), SendRequest(1, Tag.REPORT, Message((2,)))
    world.thread().post(letter, short)
    short.done.result(PATIENCE)
    found, slot, header = world.comm.message()
    assert (found, header.numbers, header.bytes) == (tag, LONG.numbers, LONG.bytes)
    assert world.comm.message()[2] == short.message
    assert world.comm.waiting(slot) in at_once
    pieces = [world.comm.take(1, slot) for _ in range(4)]
    again = SendRequest(1, Tag.REPORT, Message((3,)))
    world.threads[0].post(again)
    again.done.result(PATIENCE)
    assert not letter.done.done()
    assert np.array_equal(np.concatenate([*pieces, world.comm.take(1, slot)]), contents(LONG)[0])
    letter.done.result(PATIENCE)


def test_a_vector_is_replaced_by_the_sum_of_all_ranks(world: World) -> None:
    vector, done = np.arange(3.0), LocalFuture(lambda: None)
    world.thread().post(SumRequest(vector, done))
    wait([done], PATIENCE)
    assert done.done()
    assert vector.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (pack(99, 0, Message((1,))), "tag 99, slot 0, 1 numbers"),
        (np.zeros(9, np.uint8), "a header of 9 bytes"),
        (pack(Tag.STATE, 1, Message((), (torch.empty(1 + 16 * CHUNK, dtype=torch.uint8),))), "vectors of types and lengths"),
        (pack(Tag.STATE, 1, Message((), (torch.empty(9 * CHUNK, dtype=torch.uint8),) * 2)), "more than transport.longest"),
    ],
)
def test_a_frame_that_is_malformed_or_too_long_ends_every_wait_with_its_sentence(
    world: World, frame: np.ndarray, said: str
) -> None:
    transport = world.transport()
    world.comm.put(2, frame)
    for waits in (transport.receive(1, Tag.PUSH).result, transport.receive(None, Tag.ANSWER).result, transport.event().wait):
        with pytest.raises(Malformed, match=f"a message from rank 2 is not as it should be: .*{said}.*; check that all ranks"):
            together(waits)


def test_an_error_of_mpi_ends_every_wait_and_says_where(world: World) -> None:
    transport = world.transport()
    world.comm.broken = RuntimeError("MPI_ERR_OTHER")
    with pytest.raises(UserError, match=r"MPI failed on host .*: MPI_ERR_OTHER"):
        together(transport.receive(1, Tag.PUSH).result)


def test_each_rank_gets_a_heartbeat_eight_times_per_deadline_but_no_second_while_one_is_in_flight(world: World) -> None:
    world.comm.holds = True
    thread = world.thread()

    def beats() -> int:
        """How many heartbeats have been sent once the thread has looked at the clock again."""
        letter = SendRequest(1, Tag.REPORT, Message())
        thread.post(letter)
        letter.done.result(PATIENCE)
        return world.comm.waiting(0) - 1

    assert {unpack(world.comm.take(rank), "rank 0", CHUNK, [BEAT])[0] for rank in (1, 2)} == {BEAT}
    world.recipient.beats.get(timeout=PATIENCE)
    for _ in range(3):
        world.now += 1.0
        world.recipient.beats.get(timeout=PATIENCE)
    world.comm.holds = False
    assert beats() == 0
    world.now += 1.0
    assert beats() == 3, "one to each rank, and the message of before"
    world.now += 0.9
    assert beats() == 4
    world.now += 0.2
    assert beats() == 7


def test_a_rank_that_is_silent_past_the_deadline_is_named_to_whoever_waits_for_it(world: World) -> None:
    transport = world.transport()
    world.now = 7.0
    for frame in (pack(BEAT, 0, Message()), pack(Tag.REPORT, 0, Message())):
        world.comm.put(1, frame)
    assert transport.receive(None, Tag.REPORT).result() == (1, Message()), "the heartbeat itself is no message"
    world.now = 9.0
    waiting = transport.receive(1, Tag.PUSH)
    waiting.alive()
    for waits in (transport.receive(2, Tag.PUSH).result, transport.receive(None, Tag.PUSH).result, transport.event().wait):
        with pytest.raises(Lost, match=r"rank 2 on host host2 has been silent for 9 s \(transport.deadline\); training"):
            together(waits)
    world.now = 15.1
    with pytest.raises(Lost, match="rank 1 on host host1 has been silent for 8 s"):
        together(waiting.result)


def test_pieces_of_a_long_message_are_signs_of_life(world: World) -> None:
    transport = world.transport()
    for frame in (pack(Tag.PUSH, 7, LONG), pack(Tag.REPORT, 0, Message())):
        world.comm.put(1, frame)
    transport.receive(1, Tag.REPORT).result()
    world.now = 9.0
    for piece in PIECES:
        world.comm.put(1, piece, tag=7)
    whole = transport.receive(1, Tag.PUSH)
    wait([whole], PATIENCE)
    whole.alive()


def test_transfers_that_training_waits_for_are_traced_and_others_are_not(world: World) -> None:
    world.recipient.observe = lambda *span: world.recipient.aborted(span)
    letters = [SendRequest(1, tag, Message()) for tag in (Tag.REPORT, Tag.PUSH)]
    world.thread().post(*letters)
    assert world.recipient.next() == ("send gradients", "network out", 0.0, 0.0)
    world.comm.put(1, pack(Tag.PUSH, 7, LONG))
    for piece in PIECES:
        world.comm.put(1, piece, tag=7)
    assert world.recipient.next() == ("receive gradients", "network in", 0.0, 0.0)


def test_a_failure_is_told_to_all_ranks_and_one_of_another_rank_ends_every_wait(world: World) -> None:
    transport = world.transport()
    waiting = (transport.receive(1, Tag.PUSH).result, transport.receive(None, Tag.PUSH).result, transport.event().wait)
    world.comm.put(2, pack(ABORT, 0, Message()))
    for waits in waiting:
        with pytest.raises(Aborted, match="rank 2 on host host2 failed"):
            together(waits)
    transport.fail(UserError("no such file"))
    assert [world.comm.message(rank)[0] for rank in (1, 2)] == [ABORT, ABORT]


def test_what_was_posted_is_sent_before_mpi_is_left(world: World) -> None:
    thread = world.thread()
    letters = [SendRequest(1, Tag.PUSH, Message((number,))) for number in range(3)]
    thread.post(*letters)
    thread.close()
    assert all(letter.done.done() for letter in letters)
    assert (thread.works, world.finalized) == (False, 1)


def test_mpi_is_left_without_a_rank_that_does_not_come_and_then_not_finalized(world: World) -> None:
    thread = world.thread()
    world.comm.away = True
    thread.close()
    assert (thread.works, world.finalized) == (False, 0)
    assert world.now >= progress_thread.PATIENCE


def test_closing_ends_every_wait(world: World) -> None:
    transport = world.transport()
    waiting = (transport.receive(1, Tag.PUSH).result, transport.receive(None, Tag.PUSH).result, transport.event().wait)
    transport.close()
    for waits in waiting:
        with pytest.raises(Aborted, match="the transport is closed"):
            together(waits)


def test_survivors_are_numbered_anew_and_only_hear_each_other(world: World) -> None:
    before = world.thread()
    world.comm.survivors = Comm([0, 2])
    world.comm.broken = RuntimeError("MPI_ERR_PROC_FAILED")
    assert world.recipient.next() is world.comm.broken
    after = world.thread(before)
    assert (after.rank, after.size, after.former, world.comm.revoked) == (0, 2, [0, 2], True)
    world.comm.survivors.put(1, pack(Tag.PUSH, 0, Message((1,))))
    assert world.recipient.next() == (1, Tag.PUSH, Message((1,)))
    after.close()
    assert world.finalized == 0, "MPI would wait for the rank that has ended"
