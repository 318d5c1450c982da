"""The messages that rank 0 and the other ranks exchange between two steps: orders, reports, and a barrier for all ranks.

Both ends of the protocol are here, so that leader.py and follower.py only define how they react to a message. Rank 0 receives
a report per exchange of every rank: it is a few numbers. JSON follows only if there is more to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import torch

from nmt_train.common.message import Message, from_json, to_facts
from nmt_train.corpus.data_shard import Position
from nmt_train.trace import Span
from nmt_train.training.rank_stats import Totals
from nmt_train.transport import Messages, Tag

_COUNTED = ("sentences", "tokens", "source_tokens", "skipped", "cost_tokens")  # the whole numbers of `Progress.take`
_FIXED = 8  # numbers of a report before those


class Order(StrEnum):
    """The orders of rank 0 to the other ranks."""

    EPOCHS = "epochs"  # all workers have completed this number of epochs
    REMEMBER = "remember"  # store the state of rank 0, in case another rank must become rank 0
    STEP = "step"  # only with a synchronous exchange: take the next step
    DRAIN = "drain"  # finish the exchanges in flight, then wait at the barrier
    HAND_OVER = "hand over"  # send one's part of a snapshot (who joins pulls the parameters), then wait at the barrier
    REDISTRIBUTE = "redistribute"  # drain, then wait at the barrier: rank 0 will redistribute the remaining batches
    CONTINUE = "continue"  # leave the barrier and train, perhaps with newly assigned batches
    END = "end"


_ORDERS = tuple(Order)  # a message has the place of its order


class Report(NamedTuple):
    """What a rank has done since its last report.

    counted: see `Progress.take`. settled: see `Worker.settled_position`. updates: the number that this rank knows of.
    totals: see `Worker.measured`. met: the rank has reached the barrier. exchanged: the rank has just exchanged. signal: the
    number of the signal that it has received, or 0. said: a sentence for the log. spans: of the trace.
    """

    counted: dict[str, Any]
    position: Position
    settled: Position
    updates: int
    totals: Totals
    met: bool = False
    exchanged: bool = False
    signal: int = 0
    said: str = ""
    spans: Sequence[Span] = ()

    def pack(self, known: Totals) -> Message:
        """The message to rank 0. known: the totals of the previous report; only a form that differs from theirs is sent."""
        position, settled, totals = self.position, self.settled, self.totals
        numbers = (
            self.met, self.exchanged, self.signal, self.updates, position.epochs, position.batches, settled.epochs,
            settled.batches, *(self.counted[name] for name in _COUNTED), *totals.whole,
        )  # fmt: skip
        real = torch.tensor([self.counted["cost"], *totals.real], dtype=torch.float64)
        more: dict[str, Any] = {} if totals.form == known.form else {"form": totals.form}
        more |= {name: value for name, value in (("said", self.said), ("spans", self.spans)) if value}
        return Message(numbers, (real, *from_json(more).tensors) if more else (real,))

    @classmethod
    def unpack(cls, message: Message, known: Totals) -> Report:
        """The report in a message. known: the totals of the sender's previous report. Raises Malformed if it is none."""
        more = to_facts(Message((), message.tensors[1:], message.origin)) if len(message.tensors) > 1 else {}
        real = message.vectors((torch.float64, None), *((torch.uint8, None) for _ in message.tensors[1:]))[0]
        with message.understood():
            end = _FIXED + len(_COUNTED)
            met, exchanged, signal, updates, *places = message.numbers[:_FIXED]
            counted: dict[str, Any] = dict(zip(_COUNTED, message.numbers[_FIXED:end], strict=True))
            counted["cost"], *spent = real.tolist()
            totals = Totals(more.get("form", known.form), message.numbers[end:], tuple(spent))
            if "form" in more:
                totals.nested()
            elif (len(totals.whole), len(totals.real)) != (len(known.whole), len(known.real)):
                raise ValueError("more or fewer totals than before")
            position, settled = Position(*places[:2]), Position(*places[2:])
            said, spans = str(more.get("said", "")), more.get("spans", ())
            return cls(counted, position, settled, updates, totals, bool(met), bool(exchanged), signal, said, spans)


class Orders:
    """Rank 0's end: it gives orders, receives reports, and counts the ranks that have reached the barrier."""

    def __init__(self, transport: Messages) -> None:
        self._transport = transport
        self.followers = range(1, transport.size)
        self._met = 0  # number of ranks that have reached the barrier
        self._exchanged = 0  # number of ranks that have exchanged since the last `begin_exchange`
        self._totals = [Totals.of({})] * transport.size  # of the last report of each rank
        self._next = transport.receive(None, Tag.REPORT) if self.followers else None

    def give(self, order: Order, **facts: Any) -> None:
        message = Message((_ORDERS.index(order),), from_json(facts).tensors if facts else ())
        for rank in self.followers:
            self._transport.send(rank, Tag.CONTROL, message)

    def has_report(self) -> bool:
        return self._next is not None and self._next.done()

    def report(self) -> tuple[int, Report]:
        """Wait for the next report; returns the rank that sent it, and the report."""
        assert self._next is not None, "only other ranks report"
        source, message = self._next.result()
        self._next = self._transport.receive(None, Tag.REPORT)
        report = Report.unpack(message, self._totals[source])
        self._totals[source] = report.totals
        self._met += report.met
        self._exchanged += report.exchanged
        return source, report

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
        self._totals = Totals.of({})  # of the last report
        self._next = transport.receive(0, Tag.CONTROL)

    def has_order(self) -> bool:
        return self._next.done()

    def order(self) -> tuple[Order, dict[str, Any]]:
        """Wait for the next order; returns it with its facts."""
        message = self._next.result()[1]
        self._next = self._transport.receive(0, Tag.CONTROL)
        facts = to_facts(message) if message.tensors else {}
        with message.understood():
            return _ORDERS[message.number()], facts

    def send(self, report: Report) -> None:
        self._transport.send(0, Tag.REPORT, report.pack(self._totals))
        self._totals = report.totals
