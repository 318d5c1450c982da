"""Signals that ask for an end reach whoever trains then, or next."""

from __future__ import annotations

import os
import signal

import pytest

from nmt_train.launch.stop_request import StopRequest, handling


def test_the_first_is_told_to_who_listens_and_to_who_begins_to_later_and_a_second_interrupts() -> None:
    stop_request = StopRequest()
    first: list[signal.Signals] = []
    next_one: list[signal.Signals] = []
    with handling(stop_request.ask, iter((0.0, 5.0)).__next__):
        stop_request.tell(first.append)
        assert first == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert first == [signal.SIGTERM]
        stop_request.tell(next_one.append)
        assert next_one == [signal.SIGTERM]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert first == next_one == [signal.SIGTERM]


def test_signals_within_a_second_are_one_wish() -> None:
    asked: list[signal.Signals] = []
    with handling(asked.append, iter((7.0, 7.01, 7.9, 8.1)).__next__):
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert asked == [signal.SIGTERM]
