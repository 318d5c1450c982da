"""Ring all-reduce (Patarasu & Yuan 2009), whose sums have the same bits on every rank.

The vector is cut into as many blocks as there are ranks. The partial sum of a block passes from rank to rank, always in the
same order. The last rank encodes the sum, and all ranks, including that one, decode the same message. Therefore a codec rounds
the sum in the same way on every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nmt_train.common.errors import NotFinite
from nmt_train.distributed.codec.codec import Codec
from nmt_train.distributed.exchange.worker_state import Vectors
from nmt_train.distributed.message import Message
from nmt_train.distributed.transport import Messages, Tag
from nmt_train.trace import Trace

_FINITE, _NOT_FINITE = 1, 0  # the first number of a message


class Reduction(NamedTuple):
    """divisor: dividing the weighted sum by it gives the mean. weight: total weight of all ranks."""

    divisor: float
    weight: int


class Reducer(ABC):
    """Sums the vectors of all ranks; all ranks must call it at the same point of training."""

    @abstractmethod
    def reduce(self, vector: Tensor, update: int, weight: int = 1) -> Reduction:
        """Replace `vector` (elements,) by the weighted sum of all ranks' vectors, with the same bits on every rank.

        A rank with weight 0 contributes nothing. The reducer may already divide the sum; the returned
        `Reduction` has the divisor that remains.

        If a rank's vector contains infinities or NaN, so does the sum on every rank; no rank is left waiting.
        """

    def worker_state(self) -> Vectors:
        """The vectors that the reducer keeps from one sum to the next (see `Exchange.worker_state`)."""
        return {}

    def rescued(self) -> Vectors:
        """`worker_state` after a sum that may have been interrupted: without vectors that must be equal on all ranks."""
        return self.worker_state()

    def load_worker_state(self, vectors: Mapping[str, Tensor]) -> None:
        """Continue from what `worker_state` returned."""
        return None


class RingAllReduce(Reducer):
    """Each of n ranks sends 2 (n - 1) / n of the vector and receives as much; `codec` encodes each partial sum at every hop."""

    def __init__(self, transport: Messages, codec: Codec, trace: Trace) -> None:
        self._transport, self._codec, self._trace = transport, codec, trace
        self._next, self._before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size

    @torch.no_grad()
    def reduce(self, vector: Tensor, update: int, weight: int = 1) -> Reduction:
        """Each message also carries the total weight of the ranks in its partial sum."""
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
            done.result()  # the caller must not overwrite the vector before it is sent
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
        """Receive a block from the previous rank; add it to `block`, or replace `block` by it."""
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
