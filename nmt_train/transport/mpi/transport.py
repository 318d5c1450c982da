"""The transport over MPI: the threads of a rank pass outgoing messages to its progress thread, which delivers incoming
messages to the rank's mailbox.
"""

from __future__ import annotations

import concurrent.futures
import os
import signal
import socket
from functools import partial

from torch import Tensor

from nmt_train.common.errors import UserError
from nmt_train.common.message import Message
from nmt_train.transport import Aborted, Ended, Lost, Tag, TransportConfig, describe, numbered
from nmt_train.transport.local import LocalFuture, LocalTransport
from nmt_train.transport.mpi.framing import on_host
from nmt_train.transport.mpi.progress_thread import ABORT, ProgressThread
from nmt_train.transport.mpi.rendezvous import rendezvous
from nmt_train.transport.mpi.requests import SendRequest, SumRequest
from nmt_train.transport.mpi.runtime import fault_tolerant, has_ended
from nmt_train.transport.mpi.torch_group import Group


class MpiTransport(LocalTransport):
    """Connects all ranks of MPI_COMM_WORLD. The constructor waits for all of them, at most `start_deadline` seconds.

    If `before` is given, connects the surviving ranks of that transport; the constructor then does not wait.
    """

    def __init__(self, config: TransportConfig, before: MpiTransport | None = None) -> None:
        """Raises UserError if MPI cannot be loaded or lacks a required feature, or if a rank does not connect in time."""
        super().__init__()
        self._config, self._next = config, self
        self.fault_tolerant = fault_tolerant()
        self._watching = False
        self._group: Group | None = None
        self._progress_thread: ProgressThread = ProgressThread(config, self, before._progress_thread if before else None)
        if before is None:
            self._meet()

    def _meet(self) -> None:
        config = self._config
        try:
            self._progress_thread.ready.result(config.start_deadline)
        except concurrent.futures.TimeoutError:
            size = os.environ.get("OMPI_COMM_WORLD_SIZE", "some")
            raise Lost(
                f"MPI: after {config.start_deadline:g} s (transport.start_deadline), not all of {size} ranks had started, as"
                f" seen from {socket.gethostname()}; look for a host that does not respond, or a rank that hangs"
            ) from None
        self.rank, self.size = self._progress_thread.rank, self._progress_thread.size
        self.hosts = ("?",) * self.size
        self.hosts, self.nodes, self.offset = rendezvous(self, config.start_deadline)
        self._progress_thread.heard = [self._progress_thread.awake.now()] * self.size
        self._watching = True

    def _carry(self, to: int, tag: Tag, message: Message) -> concurrent.futures.Future[None]:
        on_its_way = Message(message.numbers, tuple(on_host(tensor) for tensor in message.tensors))
        letter = SendRequest(to, int(tag), on_its_way, LocalFuture(partial(self._check, to)))
        self._progress_thread.post(letter)
        return letter.done

    def add_up(self, vector: Tensor, by: str = "mpi") -> LocalFuture:
        if by == "torch":
            done = LocalFuture(self._check)
            self._group = self._group or Group(self, vector.device.type, self._config.start_deadline, self._check)
            self._group.add_up(vector)
            done.set_result(None)
            return done
        addend = SumRequest(vector.numpy(), LocalFuture(self._check))
        self._progress_thread.post(addend)
        return addend.done

    def close(self) -> None:
        self._closed = True
        self._progress_thread.close()

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        if self._progress_thread.works:
            told = [SendRequest(peer, ABORT, Message()) for peer in range(self.size) if peer != self.rank]
            self._progress_thread.post(*told)
            concurrent.futures.wait([letter.done for letter in told], timeout=1.0)

    def _end_process(self) -> None:
        if self.fault_tolerant:
            os.kill(os.getpid(), signal.SIGKILL)  # MPI does not report processes that exit, whatever their status
        self.fail(Lost("this rank hangs"))
        super()._end_process()

    def regroup(self) -> MpiTransport:
        if not isinstance(self._failure, Ended):
            raise self._failure or Lost("no rank has ended")
        following = self._next._come_after(self)
        self.until_tasks_end(self._config.deadline)  # until then, they use the memory of the previous worker
        return following

    def _come_after(self, before: MpiTransport) -> MpiTransport:
        try:
            self._progress_thread.ready.result(self._config.deadline)
        except concurrent.futures.TimeoutError:
            raise Lost(
                f"after another rank ended, the remaining ranks did not all reconnect within {self._config.deadline:g} s"
                f" (transport.deadline), as seen from {socket.gethostname()}; start the same command again"
            ) from None
        former = self._progress_thread.former
        self.rank, self.size, self.offset = self._progress_thread.rank, self._progress_thread.size, before.offset
        self.ended = describe(before, *(rank for rank in range(before.size) if rank not in former))
        self.hosts = tuple(before.hosts[rank] for rank in former)
        self.nodes = numbered([before.nodes[rank] for rank in former])
        self._watching = True
        return self

    # Methods that the progress thread calls, in addition to `deliver`

    def aborted(self, source: int) -> None:
        host = self.hosts[source] if source < len(self.hosts) else "?"
        self._failure = self._failure or Aborted(f"rank {source} on host {host} failed")

    def failed(self, error: BaseException) -> None:
        """If processes have ended, start to connect the surviving ranks immediately, regardless of what their tasks do."""
        if has_ended(self._progress_thread.mpi, error) and not self._closed:
            self._next = MpiTransport(self._config, self)
            self._failure = self._failure or Ended(
                "another rank's process has ended (see the system's log); start the same command again"
            )
        else:
            failed = UserError(f"MPI failed on host {socket.gethostname()}: {error}")
            self._failure = self._failure or (error if isinstance(error, UserError) else failed)

    def _check(self, source: int | None = None) -> None:
        super()._check(source)
        if not self._watching:
            return
        now = self._progress_thread.awake.now()
        for peer in range(self.size) if source is None else [source]:
            silent = now - self._progress_thread.heard[peer]
            if peer != self.rank and silent > self._config.deadline:
                raise Lost(
                    f"rank {peer} on host {self.hosts[peer]} has been silent for {silent:.0f} s (transport.deadline); training"
                    " cannot continue without it: repair the host or the link, then start the same command again"
                )
