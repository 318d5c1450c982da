"""Facts that all ranks exchange while they do not train: all ranks call these functions at the same point."""

from __future__ import annotations

from typing import Any

from nmt_train.common.message import Message, from_json, to_facts
from nmt_train.transport import Messages, Tag


def gather(transport: Messages, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """The facts of every rank, on rank 0; nothing on the others. Raises Malformed if another rank's lack a key of `mine`."""
    if transport.rank:
        transport.send(0, Tag.HELLO, from_json(mine))
        return []
    return [mine, *(to_facts(transport.receive(rank, Tag.HELLO).result()[1], *mine) for rank in range(1, transport.size))]


def broadcast(transport: Messages, facts: dict[str, Any], *keys: str) -> dict[str, Any]:
    """The facts of rank 0. Raises Malformed if they lack one of `keys`."""
    if transport.rank:
        return to_facts(transport.receive(0, Tag.HELLO).result()[1], *keys)
    for rank in range(1, transport.size):
        transport.send(rank, Tag.HELLO, from_json(facts))
    return facts


def barrier(transport: Messages, number: int = 0) -> int:
    """Wait until all ranks are here; returns rank 0's number."""
    if transport.rank:
        transport.send(0, Tag.REPORT, Message())
        return transport.receive(0, Tag.CONTROL).result()[1].number()
    for rank in range(1, transport.size):
        transport.receive(rank, Tag.REPORT).result()
    for rank in range(1, transport.size):
        transport.send(rank, Tag.CONTROL, Message((number,)))
    return number
