"""Connects the ranks at the start: determines the host of each rank and the offsets between their clocks."""

from __future__ import annotations

import concurrent.futures
import socket
import time
from pathlib import Path
from typing import Any

from nmt_train.common.message import Message, from_json, to_json
from nmt_train.transport import Lost, Tag, Transport, numbered

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PINGS = 20


def rendezvous(transport: Transport, deadline: float) -> tuple[tuple[str, ...], tuple[int, ...], float]:
    """Hosts and nodes of all ranks, and the seconds by which rank 0's clock is ahead of this host's.

    Raises Lost, which names the ranks that did not connect within `deadline` seconds, or the error of a rank that fails.
    """
    mine = [socket.gethostname(), _BOOT.read_text().strip() if _BOOT.exists() else ""]
    end = time.monotonic() + deadline
    if transport.rank == 0:
        cards: list[Any] = [mine] + [None] * (transport.size - 1)
        while None in cards:
            missing = [rank for rank, card in enumerate(cards) if card is None]
            source, message = _await(
                transport, None, end, f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}", deadline
            )
            cards[source] = to_json(message)
        for peer in range(1, transport.size):
            transport.send(peer, Tag.HELLO, from_json(cards))
    else:
        transport.send(0, Tag.HELLO, from_json(mine))
        cards = to_json(_await(transport, 0, end, "rank 0", deadline)[1])
    known = [tuple(card) for card in cards]
    nodes = numbered(known)
    offset = 0.0
    for peer in range(1, transport.size):
        if known[peer][1] == known[0][1]:
            continue  # both ranks use the clock of the same kernel
        if transport.rank == 0:
            answer_pings(transport, peer, deadline)
        elif transport.rank == peer:
            offset = measure_offset(transport, deadline)
    return tuple(card[0] for card in known), nodes, offset


def _await(transport: Transport, source: int | None, end: float, missing: str, deadline: float) -> tuple[int, Message]:
    future: Any = transport.receive(source, Tag.HELLO)
    while not future.done():
        if time.monotonic() > end:
            raise Lost(
                f"MPI: {missing} of {transport.size} did not connect within {deadline:g} s (transport.start_deadline); look"
                f" at what {'it does' if ',' not in missing else 'they do'} on the host"
            )
        future.alive()
        concurrent.futures.wait([future], timeout=0.5)
    mail: tuple[int, Message] = future.result()
    return mail


def measure_offset(transport: Transport, deadline: float) -> float:
    """The seconds by which rank 0's clock is ahead, measured at the midpoint of the shortest of several round trips to it.

    Raises Lost as `rendezvous` does; so does `answer_pings`.
    """
    best, latest = (float("inf"), 0.0), time.monotonic() + transport.size * deadline  # rank 0 serves one after the other
    for _ in range(_PINGS):
        start = transport.now()
        transport.send(0, Tag.HELLO, Message())
        theirs = _await(transport, 0, latest, "rank 0", deadline)[1].number() / 1e9
        end = transport.now()
        best = min(best, (end - start, theirs - (start + end) / 2))
    return best[1]


def answer_pings(transport: Transport, peer: int, deadline: float) -> None:
    latest = time.monotonic() + deadline
    for _ in range(_PINGS):
        _await(transport, peer, latest, f"rank {peer}", deadline)
        transport.send(peer, Tag.HELLO, Message((int(transport.now() * 1e9),)))
