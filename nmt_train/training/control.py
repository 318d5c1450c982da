"""The messages that rank 0 and the other ranks exchange between two steps: orders, reports, and a barrier for all ranks.

Both ends of the protocol are here, so that leader.py and follower.py only define how they react to a message.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from nmt_train.distributed.message import from_json, to_facts
from nmt_train.distributed.transport import Messages, Tag

_REPORTED = ("counted", "position", "settled", "updates", "measured")


class Order(StrEnum):
    """The orders of rank 0 to the other ranks."""

    EPOCHS = "epochs"  # all workers have completed this number of epochs
    REMEMBER = "remember"  # store the state of rank 0, in case another rank must become rank 0
    STALLED = "stalled"  # a validation brought no new best
    STEP = "step"  # only with a synchronous exchange: take the next step
    DRAIN = "drain"  # finish the exchanges in flight, then wait at the barrier
    HAND_OVER = "hand over"  # send one's part of a snapshot (who joins pulls the parameters), then wait at the barrier
    REDISTRIBUTE = "redistribute"  # drain, then wait at the barrier: rank 0 will redistribute the remaining batches
    CONTINUE = "continue"  # leave the barrier and train, perhaps with newly assigned batches
    END = "end"


class Orders:
    """Rank 0's end: it gives orders, receives reports, and counts the ranks that have reached the barrier."""

    def __init__(self, transport: Messages) -> None:
        self._transport = transport
        self.followers = range(1, transport.size)
        self._met = 0  # number of ranks that have reached the barrier
        self._exchanged = 0  # number of ranks that have exchanged since the last `begin_exchange`
        self._next = transport.receive(None, Tag.REPORT) if self.followers else None

    def give(self, order: Order, **facts: Any) -> None:
        for rank in self.followers:
            self._transport.send(rank, Tag.CONTROL, from_json({"do": order, **facts}))

    def has_report(self) -> bool:
        return self._next is not None and self._next.done()

    def report(self) -> tuple[int, dict[str, Any]]:
        """Wait for the next report; returns the rank that sent it and its facts."""
        assert self._next is not None, "only other ranks report"
        source, message = self._next.result()
        self._next = self._transport.receive(None, Tag.REPORT)
        facts = to_facts(message, *_REPORTED)
        self._met += facts.get("met", False)
        self._exchanged += facts.get("exchanged", False)
        return source, facts

    @property
    def all_met(self) -> bool:
        """Whether all other ranks have reached the barrier."""
        return self._met >= len(self.followers)

    def leave_meeting(self) -> None:
        """Reset the number of ranks at the barrier."""
        self._met = 0

    @property
    def all_exchanged(self) -> bool:
        """Whether all other ranks have exchanged since the last `begin_exchange`."""
        return self._exchanged >= len(self.followers)

    def begin_exchange(self) -> None:
        self._exchanged = 0


class Reports:
    """The end of every other rank: it receives orders and sends reports."""

    def __init__(self, transport: Messages) -> None:
        self._transport = transport
        self._next = transport.receive(0, Tag.CONTROL)

    def has_order(self) -> bool:
        return self._next.done()

    def order(self) -> tuple[Order, dict[str, Any]]:
        """Wait for the next order; returns it with its facts."""
        message = self._next.result()[1]
        facts = to_facts(message, "do")
        self._next = self._transport.receive(0, Tag.CONTROL)
        with message.understood():
            return Order(facts["do"]), facts

    def send(self, facts: dict[str, Any]) -> None:
        """Send a report. facts: at least `counted`, `position`, `settled`, `updates` and `measured`.

        Optional facts: `met` (the rank has reached the barrier), `exchanged` (the rank has just exchanged), `said` (a sentence
        for the log), `signal` (its number) and `spans` (of the trace).
        """
        self._transport.send(0, Tag.REPORT, from_json(facts))
