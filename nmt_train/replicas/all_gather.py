"""All ranks send their encoded vector to all others, and add up what they decode (SparseLoCo, Sarfi et al. 2025).

Unlike an all-reduce, it works with codecs whose messages cannot be summed. Every rank decodes the same messages in the same
order, its own included, so the sums have the same bits on every rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nmt_train.codec.codec import Codec
from nmt_train.codec.config import TileConfig
from nmt_train.codec.error_feedback import ErrorFeedback
from nmt_train.common.message import Message
from nmt_train.replicas.reducer import FINITE, NO_BATCH, NOT_FINITE, Reducer, Reduction, encoded
from nmt_train.strategy.context import BuildContext
from nmt_train.strategy.plan import ReplicasPlan
from nmt_train.trace import Trace
from nmt_train.transport import Messages, Tag


class GatherReducer(Reducer):
    """Sums what all ranks have encoded; error feedback keeps what a codec leaves out. A rank sends n - 1 messages."""

    codecs = "any"

    @classmethod
    def build(cls, context: BuildContext, settings: ReplicasPlan) -> Reducer:
        codec, tiles = context.codec(settings.codec, context.plan.dropped_up), context.plan.codecs.tiles
        return cls(context.transport, codec, tiles, context.flat.gradient, context.trace)

    def __init__(self, transport: Messages, codec: Codec, config: TileConfig, like: Tensor, trace: Trace) -> None:
        """like: a vector of the model's size and device."""
        self._transport, self._trace, self.rate = transport, trace, config.rate
        feeds_back = not codec.lossless and transport.size > 1
        self._feedback = ErrorFeedback(codec, torch.zeros_like(like), config.decay) if feeds_back else None
        self._codec: Codec = self._feedback or codec
        self._sent: Message | None = None  # the message of an exchange until its sum is applied
        self._others = [*range(transport.rank + 1, transport.size), *range(transport.rank)]

    @torch.no_grad()
    def reduce(self, vector: Tensor, update: int, weight: int = 1) -> Reduction:
        if not self._others:
            return Reduction(1.0, weight)
        mine = self._encode(vector, update, weight)
        self._sent = mine if mine.number() == FINITE else None
        messages = self._gather(mine)
        if any(message.number() == NOT_FINITE for message in messages):
            self.undo()
        total = 0
        vector.zero_()
        for message in messages:
            with self._trace.span("decode", vector.numel()):
                total += self._add(message, vector)
        return Reduction(max(1, total), total)

    def _encode(self, vector: Tensor, update: int, weight: int) -> Message:
        if not weight:  # the residual waits for the next vector
            return Message((NO_BATCH, 0))
        with self._trace.span("encode", self._codec.cost_elements(vector.numel())):
            if self.rate != 1:
                vector.mul_(self.rate)
            given = vector if self._feedback is not None else vector.clone()  # a message may share memory with its vector
            return encoded(self._codec, given, update, weight)

    def _gather(self, mine: Message) -> list[Message]:
        """The messages of all ranks, in the order of the ranks."""
        sent = [self._transport.send(rank, Tag.REDUCE, mine) for rank in self._others]
        coming = {rank: self._transport.receive(rank, Tag.REDUCE) for rank in self._others}
        with self._trace.span("waiting"):
            found = {rank: future.result()[1] for rank, future in coming.items()}
            for done in sent:
                done.result()
        found[self._transport.rank] = mine
        return [found[rank] for rank in range(self._transport.size)]

    def _add(self, message: Message, vector: Tensor) -> int:
        """Add a message, weighted, to `vector`; return the weight."""
        kind, weight = message.number(), message.number(1)
        if kind == NO_BATCH:
            return 0
        if kind == NOT_FINITE:
            vector.fill_(torch.nan)
            return weight
        self._codec.add(message.without_numbers(2).on(vector.device), vector, scale=float(weight))
        return weight

    def undo(self) -> None:
        """Take back the last message, if there was one: no rank applies its sum."""
        if self._sent is not None and self._feedback is not None:
            self._feedback.undo()
        self._sent = None

    def applied(self) -> None:
        """Called when the last sum has been applied."""
        self._sent = None

    @property
    def unapplied(self) -> Tensor | None:
        """The decoded message of the last exchange (elements,) if its sum has not been applied; otherwise None."""
        if self._sent is None or self._feedback is None:
            return None
        decoded = torch.zeros_like(self._feedback.residual)
        self._codec.add(self._sent.without_numbers(2).on(decoded.device), decoded)
        return decoded

    @property
    def residual(self) -> Tensor | None:
        return None if self._feedback is None else self._feedback.residual
