"""The common part of all real transports: tasks as threads, futures between them, and mailboxes. Without a subclass, it is the
transport of a single rank.
"""

from __future__ import annotations

import concurrent.futures
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from nmt_train import device
from nmt_train.common.errors import TRY_AGAIN
from nmt_train.common.message import Message
from nmt_train.transport import Aborted, Ended, Tag, describe
from nmt_train.transport.mailbox import Mailbox, count
from nmt_train.transport.watchdog import Watchdog

_EPOCH = time.time() - time.perf_counter()
_LOOK = 0.5  # seconds between two checks that the other side of a wait is alive


class LocalFuture(concurrent.futures.Future[Any]):
    """A future whose wait calls `alive` regularly, and ends if `alive` raises an error; `timeout` is ignored."""

    def __init__(self, alive: Callable[[], None]) -> None:
        super().__init__()
        self.alive = alive

    def result(self, timeout: float | None = None) -> Any:
        while True:
            try:
                return super().result(_LOOK)
            except concurrent.futures.TimeoutError:  # of the wait, or of the task itself, since both have the same class
                if self.done():
                    return super().result(0)
                self.alive()


class LocalEvent:
    """An event whose wait calls `alive` regularly, and ends if `alive` raises an error."""

    def __init__(self, alive: Callable[[], None]) -> None:
        self._event, self._alive = threading.Event(), alive
        self.set, self.clear, self.is_set = self._event.set, self._event.clear, self._event.is_set

    def wait(self) -> None:
        while not self._event.wait(_LOOK):
            self._alive()


class LocalTransport:
    """The transport of a single rank, which can only send to itself; messages arrive immediately.

    Subclasses carry messages to other ranks in `_carry` and hand incoming ones to `deliver`.
    """

    parallel = True

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self.nodes: tuple[int, ...] = (0,)
        self.hosts: tuple[str, ...] = (socket.gethostname(),)
        self.sent: dict[Tag, list[int]] = defaultdict(lambda: [0, 0])
        self._mailbox = Mailbox[LocalFuture]()
        self.received = self._mailbox.received
        self.offset = 0.0  # seconds to add to this host's clock to get rank 0's
        self.fault_tolerant, self.ended = False, ""
        self.cpu = 0.0  # CPU seconds that carrying messages has used
        self.observe: Callable[[str, str, float, float], None] | None = None  # see `Transport`
        self._mutex, self._watch = threading.Lock(), Watchdog()
        self._threads: list[threading.Thread] = []
        self._failure: BaseException | None = None
        self._closed = False

    def send(self, to: int, tag: Tag, message: Message) -> concurrent.futures.Future[None]:
        self._check()
        count(self.sent, tag, message)
        return self._carry(to, tag, message)

    def _carry(self, to: int, tag: Tag, message: Message) -> concurrent.futures.Future[None]:
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.deliver(self.rank, tag, message)
        done.set_result(None)
        return done

    def add_up(self, vector: Tensor, by: str = "mpi") -> LocalFuture:
        """With a single rank, the sum is its own vector."""
        done = LocalFuture(self._check)
        done.set_result(None)
        return done

    def receive(self, source: int | None, tag: Tag) -> LocalFuture:
        future = LocalFuture(lambda: self._check(source))
        with self._mutex:
            mail = self._mailbox.take(source, tag, future)
        if mail is not None:
            future.set_result(mail)
        return future

    def deliver(self, source: int, tag: Tag, message: Message) -> None:
        with self._mutex:
            receiver = self._mailbox.put(source, tag, message)
        if receiver is not None:
            receiver.set_result((source, message))

    def spawn(self, name: str, function: Callable[[], Any]) -> LocalFuture:
        task, enter = LocalFuture(self._watch.sign), device.inherit()

        def run() -> None:
            enter()
            self._watch.begin()
            try:
                function()
            except (Aborted, Ended) as error:
                task.set_exception(error)
            except BaseException as error:
                self._failure = self._failure or error  # this error ends the waits of other threads
                task.set_exception(error)
            else:
                task.set_result(None)
            finally:
                self._watch.end()

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        with self._mutex:
            self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]
        return task

    def until_tasks_end(self, seconds: float) -> None:
        """Wait at most `seconds` until all tasks have ended. Call it after a failure: tasks then end at their next wait."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def event(self) -> LocalEvent:
        return LocalEvent(self._check)

    def lock(self) -> threading.Lock:
        return threading.Lock()

    def now(self) -> float:
        self._watch.sign()
        return _EPOCH + time.perf_counter() + self.offset

    def task(self) -> str:
        return threading.current_thread().name

    def spend(self, name: str, work: float, seconds: float, parts: float = 1) -> None:
        """Do nothing: real work takes real time."""

    def watched(self, deadline: float) -> AbstractContextManager[None]:
        return self._watch.over(deadline, self._give_up)

    def _give_up(self, what: str) -> None:
        os.write(2, f"error: {describe(self, self.rank)}: {what}\n".encode())
        self._end_process()

    def _end_process(self) -> None:
        os._exit(TRY_AGAIN)

    def close(self) -> None:
        self._closed = True

    def fail(self, error: BaseException) -> None:
        self._failure = self._failure or error

    def regroup(self) -> LocalTransport:
        """Always raises: a single rank has no other ranks that could end."""
        raise self._failure or Aborted("no other rank is left")

    def _check(self, source: int | None = None) -> None:
        """Raise the error of this transport, if it has failed, or Aborted if it is closed."""
        self._watch.sign()
        if isinstance(self._failure, Ended):
            raise Ended(*self._failure.args)  # a new exception each time: a shared one would keep the frames of all waits alive
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise Aborted("the transport is closed")
