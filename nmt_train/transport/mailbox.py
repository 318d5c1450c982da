"""Messages that have arrived and are waiting for their receiver, and receivers that are waiting for messages."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Generic, TypeVar

from nmt_train.common.message import Message
from nmt_train.transport import Tag

F = TypeVar("F")
Mail = tuple[int, Message]  # sender, message


class Mailbox(Generic[F]):
    """The mailbox of one rank. Messages with the same tag are taken in the order of arrival. F: the futures of receivers.

    Not safe for several threads at once. Counts messages and bytes by tag in `received`.
    """

    def __init__(self) -> None:
        self.received: dict[Tag, list[int]] = defaultdict(lambda: [0, 0])
        self._mail: dict[Tag, deque[Mail]] = defaultdict(deque)
        self._receivers: dict[Tag, list[tuple[int | None, F]]] = defaultdict(list)

    def take(self, source: int | None, tag: Tag, future: F) -> Mail | None:
        """The first message from `source` (None: from anybody) if there is one; else `future` waits for the next."""
        for place, mail in enumerate(self._mail[tag]):
            if source is None or mail[0] == source:
                del self._mail[tag][place]
                return mail
        self._receivers[tag].append((source, future))
        return None

    def put(self, source: int, tag: Tag, message: Message) -> F | None:
        """Add a message that has arrived. Return the future that waits for it, or None if the mailbox keeps the message."""
        count(self.received, tag, message)
        for receiver in self._receivers[tag]:
            if receiver[0] is None or receiver[0] == source:
                self._receivers[tag].remove(receiver)
                return receiver[1]
        self._mail[tag].append((source, message))
        return None


def count(counts: dict[Tag, list[int]], tag: Tag, message: Message) -> None:
    """Add a message and its bytes."""
    counts[tag][0] += 1
    counts[tag][1] += message.bytes
