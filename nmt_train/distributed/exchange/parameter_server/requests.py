"""What workers ask of shards: the first number of their messages."""

from __future__ import annotations

from enum import IntEnum


class Push(IntEnum):
    """Requests under the tag PUSH, in the order in which a worker makes them."""

    EXCHANGE = 0  # update, and answer with parameters or a delta
    GIVE = 1  # update, and acknowledge
    FETCH = 2  # answer with parameters or a delta
    REST = 3  # do not wait for this worker until its next push; acknowledge


class Pull(IntEnum):
    """Requests under the tag PULL, which may overtake pushes."""

    ALL = 4  # all parameters; while no worker has a push under way
    EXPECT = 5  # wait for this worker from now on
    HAS = 6  # the same; it has the parameters that the message holds
    COPY = 7  # all parameters, at any time, or their running mean
