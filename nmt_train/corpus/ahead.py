"""Makes the next items of an iterator in a thread, so that a GPU does not wait for them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
_DEPTH = 3  # items that are ready


class Ahead(Generic[T]):
    """The items of `made` in their order, each made up to three items before it is asked for.

    A thread makes them from the first `next` until `close`, or until nobody refers to this object any more. finish: what the
    thread does with each item; begin: what it does first. Its error is raised where the item would have been returned.
    """

    def __init__(self, made: Iterator[T], finish: Callable[[T], T], begin: Callable[[], None] = lambda: None) -> None:
        self._ready = queue.Queue[tuple[bool, T | BaseException]](_DEPTH)
        self._stopped = threading.Event()
        # The thread must not refer to this object, which would then live as long as the thread.
        work = (made, finish, begin, self._ready, self._stopped)
        self._thread: threading.Thread | None = threading.Thread(target=_make, args=work, name="batches", daemon=True)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._stopped.is_set():
            raise StopIteration
        if self._thread is not None:
            self._thread.start()
            self._thread = None
        good, item = self._ready.get()
        if good:
            return item  # type: ignore[return-value]
        self.close()
        raise item  # type: ignore[misc]

    def close(self) -> None:
        self._stopped.set()
        while not self._ready.empty():  # so that the thread, which may wait for room, sees it
            self._ready.get_nowait()

    def __del__(self) -> None:
        self.close()


def _make(
    made: Iterator[T],
    finish: Callable[[T], T],
    begin: Callable[[], None],
    ready: queue.Queue[tuple[bool, T | BaseException]],
    stopped: threading.Event,
) -> None:
    try:
        begin()
        for item in made:
            done = finish(item)
            while not stopped.is_set():
                try:
                    ready.put((True, done), timeout=1.0)
                    break
                except queue.Full:
                    continue
            if stopped.is_set():
                return
        ready.put((False, StopIteration()))
    except BaseException as error:  # whoever asks for the item raises it
        ready.put((False, error))
