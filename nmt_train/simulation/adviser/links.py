"""Measures the connections between the ranks of a job: latency, and bandwidth while one machine sends and while all do."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nmt_train.common.message import Message
from nmt_train.transport import Tag, Transport
from nmt_train.transport.collective import barrier, gather

_TRIPS = 30  # round trips whose median is the latency
_BLOCK, _WINDOW = 1 << 20, 4  # bytes of a message, and how many are in flight
_SETTLING = 2  # first blocks, which are not measured
_MORE, _END = 1, 0  # the first number of a block


@dataclass(frozen=True)
class Link:
    """latency [s]. one: bandwidth while only one rank sends. all: by rank, bandwidth while all send and receive [bytes/s]."""

    latency: float
    one: float
    all: tuple[float, ...]

    @property
    def bandwidth(self) -> float:
        """The bandwidth of a card while it sends and receives: the median over ranks."""
        return statistics.median(self.all)


def between(transport: Transport, ranks: Sequence[int], seconds: float) -> Link | None:
    """Measure the connections between these ranks, at least two; every rank of the job calls this at the same point.

    seconds: the length of each of three measurements. Returns the result on rank 0, None on all others.
    """
    found: list[float] = []
    first, second = ranks[:2]
    if transport.rank in (first, second):
        found.append(_latency(transport, first, second))
    barrier(transport)
    ring = dict(zip(ranks, [*ranks[1:], ranks[0]], strict=True))
    for pairs in ({first: second}, ring, {to: sender for sender, to in ring.items()}):
        found.append(_received(transport, pairs, seconds))
        barrier(transport)
    by_rank = [facts["found"] for facts in gather(transport, {"found": found})]
    if transport.rank:
        return None
    # A slow card also slows down what its neighbor receives from it, but not what it receives from its other neighbor.
    return Link(by_rank[first][0], by_rank[second][-3], tuple(max(by_rank[rank][-2:]) for rank in ranks))


def _latency(transport: Transport, first: int, second: int) -> float:
    """Half of the median time of a round trip between two ranks, which both call this."""
    other = second if transport.rank == first else first
    times = []
    for _ in range(_TRIPS):
        start = transport.now()
        if transport.rank == first:
            transport.send(other, Tag.HELLO, Message())
        transport.receive(other, Tag.HELLO).result()
        if transport.rank == second:
            transport.send(other, Tag.HELLO, Message())
        times.append(transport.now() - start)
    return statistics.median(times) / 2


def _received(transport: Transport, pairs: dict[int, int], seconds: float) -> float:
    """Send and receive as `pairs` (sender to receiver) say; returns the received bytes per second, or 0."""
    sender = None
    if transport.rank in pairs:
        sender = transport.spawn("sender", lambda: _send(transport, pairs[transport.rank], seconds))
    source = next((rank for rank, to in pairs.items() if to == transport.rank), None)
    blocks, start, end = -_SETTLING, 0.0, 0.0
    while source is not None and transport.receive(source, Tag.PUSH).result()[1].number() == _MORE:
        blocks, end = blocks + 1, transport.now()
        if blocks == 0:
            start = end
    if sender is not None:
        sender.result()
    return max(0, blocks) * _BLOCK / (end - start) if blocks > 0 and end > start else 0.0


def _send(transport: Transport, to: int, seconds: float) -> None:
    block = Message((_MORE,), (torch.zeros(_BLOCK, dtype=torch.uint8),))
    under_way = [transport.send(to, Tag.PUSH, block) for _ in range(_WINDOW)]
    start, sent = transport.now(), _WINDOW
    while transport.now() - start < seconds or sent <= 2 * _SETTLING:
        under_way.pop(0).result()
        under_way.append(transport.send(to, Tag.PUSH, block))
        sent += 1
    for done in under_way:
        done.result()
    transport.send(to, Tag.PUSH, Message((_END,)))
