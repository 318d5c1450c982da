"""How ranks meet at the start: who is on which host, and how far their clocks are apart."""

from __future__ import annotations

import concurrent.futures
import socket
import time
from pathlib import Path
from typing import Any

from nmt_train.common.errors import UserError
from nmt_train.distributed.message import Message, from_json, to_json
from nmt_train.distributed.transport import Tag, Wire, numbered

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PINGS = 20


def meet(wire: Wire, deadline: float) -> tuple[tuple[str, ...], tuple[int, ...], float]:
    """Hosts and nodes of all ranks, and the seconds by which rank 0's clock is ahead of this host's.

    UserError names the ranks that did not come within `deadline` seconds.
    """
    mine = [socket.gethostname(), _BOOT.read_text().strip() if _BOOT.exists() else ""]
    end = time.monotonic() + deadline
    if wire.rank == 0:
        cards: list[Any] = [mine] + [None] * (wire.size - 1)
        while None in cards:
            missing = [rank for rank, card in enumerate(cards) if card is None]
            source, message = _await(
                wire, None, end, f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}", deadline
            )
            cards[source] = to_json(message)
        for peer in range(1, wire.size):
            wire.send(peer, Tag.HELLO, from_json(cards))
    else:
        wire.send(0, Tag.HELLO, from_json(mine))
        cards = to_json(_await(wire, 0, end, "rank 0", deadline)[1])
    known = [tuple(card) for card in cards]
    nodes = numbered(known)
    offset = 0.0
    for peer in range(1, wire.size):
        if known[peer][1] == known[0][1]:
            continue  # the same kernel keeps both clocks
        if wire.rank == 0:
            answer_pings(wire, peer)
        elif wire.rank == peer:
            offset = measure_offset(wire)
    return tuple(card[0] for card in known), nodes, offset


def _await(wire: Wire, source: int | None, end: float, missing: str, deadline: float) -> tuple[int, Message]:
    future: Any = wire.receive(source, Tag.HELLO)
    while not future.done():
        if time.monotonic() > end:
            raise UserError(
                f"MPI: {missing} of {wire.size} did not show up within {deadline:g} s (wire.start_deadline); look at what"
                f" {'it does' if ',' not in missing else 'they do'} on the host"
            )
        concurrent.futures.wait([future], timeout=0.5)
    mail: tuple[int, Message] = future.result()
    return mail


def measure_offset(wire: Wire) -> float:
    """The midpoint of the shortest of several round trips to rank 0, which answers with its clock."""
    best = (float("inf"), 0.0)
    for _ in range(_PINGS):
        start = wire.now()
        wire.send(0, Tag.HELLO, Message())
        theirs = wire.receive(0, Tag.HELLO).result()[1].number() / 1e9
        end = wire.now()
        best = min(best, (end - start, theirs - (start + end) / 2))
    return best[1]


def answer_pings(wire: Wire, peer: int) -> None:
    for _ in range(_PINGS):
        wire.receive(peer, Tag.HELLO).result()
        wire.send(peer, Tag.HELLO, Message((int(wire.now() * 1e9),)))
