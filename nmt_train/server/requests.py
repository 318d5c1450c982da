"""The kinds of requests from workers to shards: the first number of each message."""

from __future__ import annotations

from enum import IntEnum

from nmt_train.common.message import Message


class Push(IntEnum):
    """Requests under the tag PUSH; a shard handles those of a worker in the order in which they were sent."""

    EXCHANGE = 0  # update, and answer with parameters or a delta
    GIVE = 1  # update, and acknowledge
    FETCH = 2  # answer with parameters or a delta
    REST = 3  # do not wait for this worker until its next push; acknowledge


class Pull(IntEnum):
    """Requests under the tag PULL, which may overtake pushes."""

    ALL = 4  # all parameters; only while no worker has a push in flight
    EXPECT = 5  # wait for this worker from now on
    HAS = 6  # as EXPECT, and record that the worker has the parameters in this message
    COPY = 7  # all parameters or their running mean, at any time


def without_gradient(request: Message) -> Message:
    """What remains of a request under the tag PUSH if its gradient is lost: the shard answers, or acknowledges it."""
    remaining = {Push.EXCHANGE: Message((Push.FETCH,)), Push.GIVE: Message((Push.REST, 0))}
    return remaining.get(Push(request.number()), request)
