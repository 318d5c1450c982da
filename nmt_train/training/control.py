"""What rank 0 and the other ranks say to each other between two steps: orders, reports, and the barrier at which all meet.

Both ends of the protocol are here, so that leader.py and follower.py only say what they do with a message.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from nmt_train.distributed.message import from_json, to_facts
from nmt_train.distributed.transport import Tag, Transport

_REPORTED = ("counted", "position", "settled", "updates", "measured")


class Order(StrEnum):
    """What rank 0 tells the others to do."""

    EPOCHS = "epochs"  # so many epochs are complete
    REMEMBER = "remember"  # what rank 0 knows, in case that another rank must lead
    STALLED = "stalled"  # a validation brought no new best
    STEP = "step"  # workers in lockstep: take the next step
    DRAIN = "drain"  # finish what is under way, and meet
    HAND_OVER = "hand over"  # send this rank's part of a snapshot, and meet
    REDISTRIBUTE = "redistribute"  # finish what is under way, and meet: the remaining batches will be dealt out again
    CONTINUE = "continue"  # after a meeting; perhaps with other batches
    END = "end"


class Orders:
    """Rank 0's end: it gives orders, hears reports, and waits until all others have reached the meeting point."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.followers = range(1, transport.size)
        self._met = 0  # ranks at the meeting point
        self._exchanged = 0  # ranks that have exchanged since rank 0 last asked
        self._next = transport.receive(None, Tag.REPORT) if self.followers else None

    def give(self, order: Order, **facts: Any) -> None:
        for rank in self.followers:
            self._transport.send(rank, Tag.CONTROL, from_json({"do": order, **facts}))

    def has_report(self) -> bool:
        return self._next is not None and self._next.done()

    def report(self) -> tuple[int, dict[str, Any]]:
        """The next report and the rank that it is from; waits for one."""
        assert self._next is not None, "only other ranks report"
        source, message = self._next.result()
        self._next = self._transport.receive(None, Tag.REPORT)
        facts = to_facts(message, *_REPORTED)
        self._met += facts.get("met", False)
        self._exchanged += facts.get("exchanged", False)
        return source, facts

    @property
    def all_met(self) -> bool:
        """Whether all others are at the meeting point."""
        return self._met >= len(self.followers)

    def leave_meeting(self) -> None:
        """Count anew for the next meeting."""
        self._met = 0

    @property
    def all_exchanged(self) -> bool:
        """Whether all others have exchanged since the last `begin_exchange`."""
        return self._exchanged >= len(self.followers)

    def begin_exchange(self) -> None:
        self._exchanged = 0


class Reports:
    """Another rank's end: it receives orders and reports."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._next = transport.receive(0, Tag.CONTROL)

    def has_order(self) -> bool:
        return self._next.done()

    def order(self) -> tuple[Order, dict[str, Any]]:
        """The next order with its facts; waits for one."""
        message = self._next.result()[1]
        facts = to_facts(message, "do")
        self._next = self._transport.receive(0, Tag.CONTROL)
        with message.understood():
            return Order(facts["do"]), facts

    def send(self, facts: dict[str, Any]) -> None:
        """facts: `counted`, `position`, `settled`, `updates` and `measured` at least. met: this rank is at the meeting point;
        exchanged: it has just exchanged.
        """
        self._transport.send(0, Tag.REPORT, from_json(facts))
