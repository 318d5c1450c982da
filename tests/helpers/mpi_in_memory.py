"""An MPI whose other ranks are the test: it sees every frame that the progress thread of rank 0 sends, and moves the clock."""

from __future__ import annotations

import queue
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from nmt_train.common.message import Message, from_json
from nmt_train.transport import Tag, TransportConfig
from nmt_train.transport.mpi.framing import pack, unpack
from nmt_train.transport.mpi.progress_thread import ProgressThread
from nmt_train.transport.mpi.runtime import CHUNK
from nmt_train.transport.mpi.transport import MpiTransport

BEAT = 0  # a tag
PATIENCE = 60.0  # seconds until a test that waits fails
CONFIG = TransportConfig(deadline=8.0, longest=16 * CHUNK)
Request = Callable[[], bool]  # whether it is complete


class Comm:
    """The communicator of rank 0. holds: no heartbeat or header that is sent is complete. away: nobody comes to a barrier."""

    def __init__(self, group: list[int]) -> None:
        self.rank, self.size, self.group, self.holds, self.away, self.revoked = 0, len(group), group, False, False, False
        self.broken: Exception | None = None
        self.survivors: Comm | None = None
        self._arriving: list[tuple[int, int, np.ndarray]] = []
        self._sent: queue.Queue[tuple[int, int, np.ndarray, list[bool]]] = queue.Queue()
        self._seen: list[tuple[int, int, np.ndarray, list[bool]]] = []

    # What the test does for the other ranks

    def put(self, source: int, frame: np.ndarray, tag: int = 0) -> None:
        self._arriving.append((source, tag, frame))

    def waiting(self, tag: int) -> int:
        """How many frames with this MPI tag have been sent and not been taken."""
        while not self._sent.empty():
            self._seen.append(self._sent.get())
        return sum(its[1] == tag for its in self._seen)

    def take(self, to: int, tag: int = 0) -> np.ndarray:
        """The next frame to a rank, which waits for it."""
        while (place := next((place for place, its in enumerate(self._seen) if its[:2] == (to, tag)), None)) is None:
            self._seen.append(self._sent.get(timeout=PATIENCE))
        _, _, frame, taken = self._seen.pop(place)
        taken.append(True)
        return frame

    def message(self, to: int = 1) -> tuple[int, int, Message]:
        """Tag, slot and header of the next message to a rank that is not a heartbeat."""
        while (found := unpack(self.take(to), "rank 0", 1 << 30, range(256)))[0] == BEAT:
            pass
        return found

    # What the progress thread calls

    def _next(self, source: int | None, tag: int) -> tuple[int, np.ndarray] | None:
        for place in range(len(self._arriving)):
            sender, kind, frame = self._arriving[place]
            if kind == tag and source in (None, sender):
                del self._arriving[place]
                return sender, frame
        return None

    def Improbe(self, source: None, tag: int, status: Any) -> Any:  # noqa: N802
        if self.broken:
            raise self.broken
        if (found := self._next(source, tag)) is None:
            return None
        status.Get_source, status.Get_count = lambda: found[0], lambda unit: found[1].size
        return SimpleNamespace(Recv=lambda into: np.copyto(into[0], found[1]))

    def Irecv(self, into: Any, source: int, tag: int) -> Request:  # noqa: N802
        def complete() -> bool:
            if found := self._next(source, tag):
                np.copyto(into[0], found[1])
            return found is not None

        return complete

    def Isend(self, what: Any, to: int, tag: int) -> Request:  # noqa: N802
        self._sent.put((to, tag, what[0].copy(), []))
        return lambda: not self.holds

    def Issend(self, what: Any, to: int, tag: int) -> Request:  # noqa: N802
        taken: list[bool] = []
        self._sent.put((to, tag, what[0].copy(), taken))
        return lambda: bool(taken)

    def Iallreduce(self, place: None, vector: np.ndarray, kind: None) -> Request:  # noqa: N802
        vector += 1  # the others' sum
        return lambda: True

    def Ibarrier(self) -> Any:  # noqa: N802
        return SimpleNamespace(Test=lambda: not self.away)

    def Revoke(self) -> None:  # noqa: N802
        self.revoked = True

    def Shrink(self) -> Comm | None:  # noqa: N802
        return self.survivors


class Recipient:
    """Keeps what it is told, for `next`. beats: an entry each time that a heartbeat is due."""

    observe: Callable[[str, str, float, float], None] | None = None

    def __init__(self) -> None:
        self._did, self.beats = queue.Queue[Any](), queue.Queue[float]()

    @property
    def cpu(self) -> float:
        return 0.0

    @cpu.setter
    def cpu(self, seconds: float) -> None:
        self.beats.put(seconds)

    def now(self) -> float:
        return 0.0

    def deliver(self, source: int, tag: Tag, message: Message) -> None:
        self._did.put((source, tag, message))

    def aborted(self, source: Any) -> None:
        self._did.put(source)

    def failed(self, error: BaseException) -> None:
        self._did.put(error)

    def next(self) -> Any:
        return self._did.get(timeout=PATIENCE)


class World:
    """Three ranks and their clock, `now`. finalized: how often rank 0 has finalized MPI."""

    def __init__(self) -> None:
        self.comm, self.recipient, self.now, self.finalized = Comm([0, 1, 2]), Recipient(), 0.0, 0
        self.threads: list[ProgressThread] = []
        self.mpi = SimpleNamespace(
            COMM_WORLD=self.comm, Status=SimpleNamespace, ANY_SOURCE=None, BYTE=None, IN_PLACE=None, SUM=None,
            Request=SimpleNamespace(Testsome=lambda its: [place for place, request in enumerate(its) if request()]),
            Group=SimpleNamespace(Translate_ranks=lambda new, ranks, old: [old.index(new[rank]) for rank in ranks]),
        )  # fmt: skip

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def finalize(self, mpi: Any) -> None:
        self.finalized += 1

    def thread(self, before: ProgressThread | None = None) -> ProgressThread:
        self.threads.append(ProgressThread(CONFIG, self.recipient, before))
        self.threads[-1].ready.result(PATIENCE)
        return self.threads[-1]

    def transport(self) -> MpiTransport:
        for rank in (1, 2):
            self.comm.put(rank, pack(Tag.HELLO, 0, from_json([f"host{rank}", ""])))
        made = MpiTransport(CONFIG)
        self.threads.append(made._progress_thread)
        assert [self.comm.message(rank)[0] for rank in (1, 2)] == [Tag.HELLO, Tag.HELLO]
        return made
