"""The progress thread makes all MPI calls of a rank, so that MPI_THREAD_FUNNELED is enough.

It tests its requests in a loop, and sleeps longer after each test without progress, so that waiting does not occupy a core. It
sends a long message as a header under MPI tag 0 (framing.py), followed by pieces under a separate MPI tag (its slot).
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import numpy as np

from nmt_train.common.message import Message
from nmt_train.transport import NAMES, Lost, Tag, TransportConfig
from nmt_train.transport.mpi.framing import contents, pack, unpack
from nmt_train.transport.mpi.requests import SendRequest, Slots, SumRequest, Transfer
from nmt_train.transport.mpi.runtime import CHUNK, finalize, load
from nmt_train.transport.watchdog import AwakeClock

PATIENCE = 10.0  # seconds
ABORT = 255
_SHORTEST_SLEEP, _LONGEST_SLEEP = 5e-5, 2e-3  # seconds
# By how much each sleep is longer than the one before. With 2, a rank notices a message late by up to as long as it has waited
# for it; its answer is then late, too, so the sleeps of two ranks that answer each other grow to the longest.
_GROWTH = 1.25
_SHORT = 16 << 10  # bytes: tensors up to this total are sent in the same frame as the header
_BEAT = 0
_BEATS = 8  # heartbeats per deadline
_KINDS = frozenset(Tag)
_ALLOWED = _KINDS | {_BEAT, ABORT}


class Recipient(Protocol):
    """Receives messages from a progress thread; cpu: the CPU seconds that the thread has used."""

    cpu: float
    observe: Callable[[str, str, float, float], None] | None

    def now(self) -> float: ...

    def deliver(self, source: int, tag: Tag, message: Message) -> None: ...

    def aborted(self, source: int) -> None:
        """Called when another rank has failed."""

    def failed(self, error: BaseException) -> None:
        """Called when MPI has failed and the progress thread has ended."""


class ProgressThread:
    """Connects all ranks of MPI_COMM_WORLD or, if `before` is given, the surviving ranks of that progress thread.

    ready: is done once all these ranks are connected. former: each rank's number in the communicator of `before`.
    heard: when this rank last received anything from each rank, on the clock `awake`.
    """

    def __init__(self, config: TransportConfig, addressee: Recipient, before: ProgressThread | None = None) -> None:
        self._config, self._addressee, self._before = config, addressee, before
        self.ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.rank, self.size, self.former = 0, 1, [0]
        self.awake = AwakeClock(min(1.0, config.deadline / 4))
        self.heard: list[float] = []
        self.mpi: Any = None
        self._comm: Any = None
        self._parent: int = before._parent if before else os.getppid()
        # A lock signals new letters. A SimpleQueue is not used: if a wait for it is woken after its timeout, the wait never
        # ends (seen with CPython 3.11).
        self._letters: deque[SendRequest | SumRequest] = deque()
        self._bell = threading.Lock()
        self._closed = False
        self._requests: list[Any] = []
        self._owners: list[Transfer] = []
        self._arriving: dict[tuple[int, int], deque[list[Any]]] = defaultdict(deque)  # [message, complete], in the order sent
        self._slots = Slots()
        # Open requests and transfers of every communicator that this rank has left: MPI may still use their memory.
        self._left_over: list[tuple[list[Any], list[Transfer]]] = []
        self._beaten: list[concurrent.futures.Future[None] | None] = []
        self._next_beat = 0.0
        self._thread = threading.Thread(target=self._work, name="progress thread", daemon=True)
        self._thread.start()

    # Methods that other threads call

    def post(self, *letters: SendRequest | SumRequest) -> None:
        self._letters.extend(letters)
        self._ring()

    def _ring(self) -> None:
        with suppress(RuntimeError):  # the lock is already released
            self._bell.release()

    @property
    def works(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Leave MPI together with the other ranks, or without them after a short wait."""
        self._closed = True
        self._ring()
        self._thread.join(min(self._config.deadline, PATIENCE))

    # Methods that run on the progress thread

    def _work(self) -> None:
        try:
            self._come_together()
        except BaseException as error:
            self.ready.set_exception(error)
            return
        self.ready.set_result(None)
        try:
            sleep = _SHORTEST_SLEEP
            while not self._closed or self._requests or self._letters:
                self._beat()
                moved = self._poll() | self._collect()
                sleep = _SHORTEST_SLEEP if moved else min(_GROWTH * sleep, _LONGEST_SLEEP)
                if self._bell.acquire(timeout=sleep):
                    sleep = _SHORTEST_SLEEP
                while self._letters:
                    self._hand_over(self._letters.popleft())
            self._part()
        except BaseException as error:
            self._addressee.failed(error)

    def _come_together(self) -> None:
        if self._before is None:
            self.mpi = load()
            self._comm = self.mpi.COMM_WORLD
            self.former = list(range(self._comm.size))
        else:
            self._leave(self._before)
        self._status = self.mpi.Status()
        self.rank, self.size = self._comm.rank, self._comm.size
        self.heard = [self.awake.now()] * self.size
        self._beaten = [None] * self.size

    def _leave(self, before: ProgressThread) -> None:
        """Continue without the ranks that have ended (ULFM)."""
        if os.getppid() != self._parent:
            os._exit(Lost.status)  # the parent process has ended: the others continue without this rank, so it must end
        self.mpi = before.mpi
        before._comm.Revoke()
        # Do not cancel the old requests: a cancelled request counts as freed, and Open MPI ends the process if a message that
        # was sent with a freed request does not arrive.
        self._left_over = [*before._left_over, (before._requests, before._owners)]
        self._comm, self._before = before._comm.Shrink(), None
        self.former = self.mpi.Group.Translate_ranks(self._comm.group, list(range(self._comm.size)), before._comm.group)

    def _beat(self) -> None:
        """Send a heartbeat to every peer at regular intervals."""
        now = time.monotonic()
        if now < self._next_beat:
            return
        self._next_beat = now + self._config.deadline / _BEATS
        self._addressee.cpu = time.thread_time()
        for peer in range(self.size):
            last = self._beaten[peer]
            if peer != self.rank and (last is None or last.done()):
                letter = SendRequest(peer, _BEAT, Message())
                self._beaten[peer] = letter.done
                self._hand_over(letter)

    def _hand_over(self, letter: SendRequest | SumRequest) -> None:
        """Hand a message to MPI, or a vector to be summed."""
        if isinstance(letter, SumRequest):
            request = self._comm.Iallreduce(self.mpi.IN_PLACE, letter.vector, self.mpi.SUM)
            self._track(request, Transfer(self.rank, False, partial(letter.done.set_result, None)))
            return
        payload = contents(letter.message)
        short = sum(part.size for part in payload) <= _SHORT
        slot = 0 if short else self._slots.take(letter.to)
        frame = pack(letter.tag, slot, letter.message)

        def finish() -> None:
            self._slots.free(letter.to, slot)
            letter.done.set_result(None)

        transfer = Transfer(letter.to, False, self._timed(letter.tag, False, finish))
        self._track(self._comm.Isend([frame, self.mpi.BYTE], letter.to, 0), transfer)
        # At most two pieces of a bulk message are under way, so that training's own messages can go between the pieces.
        pieces = [] if short else self._cut(payload)
        at_once = 1 if letter.tag in (Tag.STATE, Tag.COPY, Tag.PULLED) else len(pieces)
        transfer.later.extend((piece, slot) for piece in pieces[at_once:])
        for piece in pieces[:at_once]:
            self._send(piece, slot, transfer)

    def _send(self, piece: np.ndarray, slot: int, transfer: Transfer) -> None:
        # Use a synchronous send: it completes when the receiver has begun to receive, not as soon as MPI has copied the data.
        self._track(self._comm.Issend([piece, self.mpi.BYTE], transfer.peer, slot), transfer)

    def _poll(self) -> bool:
        """Receive the headers that have arrived; return whether there were any."""
        moved, status = False, self._status
        while (found := self._comm.Improbe(self.mpi.ANY_SOURCE, 0, status)) is not None:
            moved, source = True, status.Get_source()
            frame = np.empty(status.Get_count(self.mpi.BYTE), dtype=np.uint8)
            found.Recv([frame, self.mpi.BYTE])
            self.heard[source] = self.awake.now()
            self._open_frame(source, frame)
        return moved

    def _open_frame(self, source: int, frame: np.ndarray) -> None:
        tag, slot, message = unpack(frame, f"rank {source}", self._config.longest, _ALLOWED)
        if tag == ABORT:
            self._addressee.aborted(source)
        if tag in (_BEAT, ABORT):
            return
        arrival = [message, False]
        self._arriving[source, tag].append(arrival)
        if not slot:
            self._arrived(source, tag, arrival)
            return
        transfer = Transfer(source, True, self._timed(tag, True, partial(self._arrived, source, tag, arrival)))
        for piece in self._cut(contents(message)):
            self._track(self._comm.Irecv([piece, self.mpi.BYTE], source, slot), transfer)

    def _arrived(self, source: int, tag: int, arrival: list[Any]) -> None:
        """Deliver a complete message once all earlier ones are complete: a short message can overtake a long one."""
        arrival[1] = True
        line = self._arriving[source, tag]
        while line and line[0][1]:
            self._addressee.deliver(source, Tag(tag), line.popleft()[0])

    def _cut(self, payload: list[np.ndarray]) -> list[np.ndarray]:
        return [part[start : start + CHUNK] for part in payload for start in range(0, part.size, CHUNK)]

    def _timed(self, tag: int, arrives: bool, finish: Callable[[], None]) -> Callable[[], None]:
        """Wrap `finish` so that it also reports the transfer to `observe`, if transfers of this kind are observed."""
        name, observe = NAMES.get((Tag(tag), arrives)) if tag in _KINDS else None, self._addressee.observe
        if name is None or observe is None:
            return finish
        start = self._addressee.now()

        def tell() -> None:
            observe(name, "network in" if arrives else "network out", start, self._addressee.now())
            finish()

        return tell

    def _track(self, request: Any, transfer: Transfer) -> None:
        transfer.open += 1
        self._requests.append(request)
        self._owners.append(transfer)

    def _collect(self) -> bool:
        """Find the requests that are complete, and continue their transfers; return whether there were any."""
        if not self._requests:
            return False
        finished = self.mpi.Request.Testsome(self._requests)
        if not finished:
            return False
        owners = [self._owners[place] for place in finished]
        for place in sorted(finished, reverse=True):
            del self._requests[place], self._owners[place]
        for transfer in owners:
            transfer.open -= 1
            if transfer.arrives:
                self.heard[transfer.peer] = self.awake.now()
            if transfer.later and transfer.open <= 1:
                piece, slot = transfer.later.popleft()
                self._send(piece, slot, transfer)
            elif not transfer.open:
                transfer.finish()
        return True

    def _part(self) -> None:
        """Finalize MPI together with all ranks; if a peer is missing, do not finalize."""
        barrier, deadline = self._comm.Ibarrier(), time.monotonic() + PATIENCE
        while not barrier.Test():
            self._poll()  # receive late heartbeats
            if time.monotonic() > deadline:
                return
            time.sleep(_LONGEST_SLEEP)
        if self.former == list(range(self.mpi.COMM_WORLD.size)):  # otherwise, MPI may wait forever for ended ranks
            finalize(self.mpi)
