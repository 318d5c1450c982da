"""Items that a thread makes ahead are those of the iterator; the thread ends with whoever reads it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from nmt_train.corpus.ahead import Ahead


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "batches"]


def ended() -> None:
    for thread in threads():
        thread.join(timeout=30)
    assert threads() == []


def counting(made: list[int], end: int = 10**9, error: Exception | None = None) -> Iterator[int]:
    for number in range(end):
        made.append(number)
        yield number
    if error is not None:
        raise error


def test_items_come_in_their_order_and_finished() -> None:
    assert list(Ahead(counting([], end=20), lambda number: number * 10)) == list(range(0, 200, 10))
    ended()


def test_an_error_is_raised_after_the_items_before_it() -> None:
    items = Ahead(counting([], end=5, error=OSError("the disk is gone")), lambda number: number)
    assert [next(items) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(OSError, match="the disk is gone"):
        next(items)
    ended()


def test_no_more_than_a_few_items_are_made_ahead() -> None:
    made: list[int] = []
    items = Ahead(counting(made), lambda number: number)
    assert [next(items) for _ in range(10)] == list(range(10))
    assert 10 <= len(made) <= 15
    items.close()
    ended()


def test_the_thread_ends_when_nobody_reads_any_more() -> None:
    items = Ahead(counting([]), lambda number: number)
    next(items)
    del items
    gc.collect()
    ended()


def test_a_closed_one_has_no_items() -> None:
    items = Ahead(counting([]), lambda number: number)
    items.close()
    assert list(items) == []
    ended()


def test_nothing_is_made_before_the_first_item_is_asked_for() -> None:
    made: list[int] = []
    items = Ahead(counting(made), lambda number: number)
    assert (made, threads()) == ([], [])
    items.close()
