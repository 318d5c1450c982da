"""Sums over all ranks, the same bits on every one of them: around a ring (Patarasu & Yuan 2009).

The vector is cut into as many blocks as there are ranks. A block's sum grows from rank to rank, always in the same order, and
what its last rank has sent is what everybody takes over, that rank too: so what codecs round is rounded alike everywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nmt_train.common.errors import NotFinite
from nmt_train.distributed.codec.codec import Codec
from nmt_train.distributed.exchange.exchange import Vectors
from nmt_train.distributed.message import Message
from nmt_train.distributed.transport import Tag, Transport
from nmt_train.trace import Trace

_FINITE, _NOT_FINITE = 1, 0  # the first number of a message


class Reduction(NamedTuple):
    """divisor: what makes a weighted sum the mean; weight: of all ranks together."""

    divisor: float
    weight: int


class Reducer(ABC):
    """Joins vectors of all ranks, which all call it at the same point of their work."""

    @abstractmethod
    def reduce(self, vector: Tensor, update: int, weight: int = 1) -> Reduction:
        """Replace `vector` (elements,) by the sum of all ranks' vectors, each times its weight, the same bits everywhere.

        A weight of 0 leaves a rank out, which had nothing to give. The sum may be divided already, as `Joined` says.

        Where a rank's vector is infinite or not a number, so is everybody's sum: no rank is left waiting.
        """

    def worker_state(self) -> Vectors:
        """What is kept from one sum to the next, as of `Exchange`."""
        return {}

    def rescued(self) -> Vectors:
        """`carried`, where a sum may have been cut short: without what all ranks must have alike."""
        return self.worker_state()

    def load_worker_state(self, vectors: Mapping[str, Tensor]) -> None:
        """Go on with what `carried` gave."""
        return None


class RingAllReduce(Reducer):
    """2 (n - 1) / n of the vector leaves each of n ranks, and as much comes in, encoded anew at every hop by `codec`."""

    def __init__(self, transport: Transport, codec: Codec, trace: Trace) -> None:
        self._transport, self._codec, self._trace = transport, codec, trace
        self._next, self._before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size

    @torch.no_grad()
    def reduce(self, vector: Tensor, update: int, weight: int = 1) -> Reduction:
        """Behind each block travels the weight of those ranks whose sum it is."""
        size, rank = self._transport.size, self._transport.rank
        if size == 1:
            return Reduction(1.0, weight)
        if weight != 1:
            vector.mul_(weight)
        blocks = [vector[len(vector) * part // size : len(vector) * (part + 1) // size] for part in range(size)]
        sent, total = [], weight
        for hop in range(size - 1):
            sent.append(self._send(self._encode(blocks[(rank - hop) % size], update, total)))
            total = weight + self._take(blocks[(rank - hop - 1) % size], add=True).number(1)
        mine = (rank + 1) % size
        message = self._encode(blocks[mine], update, total)
        self._decode(message, blocks[mine])
        for hop in range(size - 1):
            sent.append(self._send(message))
            message = self._take(blocks[(mine - hop - 1) % size], add=False)
        for done in sent:
            done.result()  # until then the vector may not be overwritten
        return Reduction(max(1, total), total)

    def _send(self, message: Message) -> Any:
        return self._transport.send(self._next, Tag.RING, message)

    def _encode(self, block: Tensor, update: int, weight: int) -> Message:
        with self._trace.span("encode", self._codec.cost_elements(block.numel())):
            try:
                return self._codec.encode(block, update).and_numbers(_FINITE, weight)
            except NotFinite:
                return Message((_NOT_FINITE, weight))

    def _take(self, block: Tensor, add: bool) -> Message:
        """Add what comes from the rank before to a block, or put it there."""
        with self._trace.span("waiting"):
            message: Message = self._transport.receive(self._before, Tag.RING).result()[1]
        with self._trace.span("decode", block.numel() if add else self._codec.cost_elements(block.numel())):
            self._decode(message, block, add)
        return message

    def _decode(self, message: Message, block: Tensor, add: bool = False) -> None:
        if message.number() == _NOT_FINITE:
            block.fill_(torch.nan)
            return
        bare = message.without_numbers(2).on(block.device)
        if add:
            self._codec.add(bare, block)
        elif not any(tensor.data_ptr() == block.data_ptr() for tensor in bare.tensors):
            self._codec.decode(bare, block)
