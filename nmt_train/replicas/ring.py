"""Ring all-reduce (Patarasu & Yuan 2009), whose sums have the same bits on every rank.

The vector is cut into as many blocks as there are ranks. The partial sum of a block passes from rank to rank, always in the
same order. The last rank encodes the sum, and all ranks, including that one, decode the same message. Therefore a codec rounds
the sum in the same way on every rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nmt_train.replicas.reducer import EncodingReducer, Reduction


class RingAllReduce(EncodingReducer):
    """Each of n ranks sends 2 (n - 1) / n of the vector and receives as much; `codec` encodes each partial sum at every hop."""

    @torch.no_grad()
    def reduce(self, vector: Tensor, update: int, weight: int = 1) -> Reduction:
        size, rank = self._transport.size, self._transport.rank
        following, before = (rank + 1) % size, (rank - 1) % size
        if size == 1:
            return Reduction(1.0, weight)
        if weight != 1:
            vector.mul_(weight)
        blocks = [vector[len(vector) * part // size : len(vector) * (part + 1) // size] for part in range(size)]
        sent, total = [], weight
        for hop in range(size - 1):
            sent.append(self._send(following, self._encode(blocks[(rank - hop) % size], update, total)))
            total = weight + self._take(before, blocks[(rank - hop - 1) % size], add=True).number(1)
        mine = (rank + 1) % size
        message = self._encode(blocks[mine], update, total)
        self._decode(message, blocks[mine])
        for hop in range(size - 1):
            sent.append(self._send(following, message))
            message = self._take(before, blocks[(mine - hop - 1) % size], add=False)
        for done in sent:
            done.result()  # the caller must not overwrite the vector before it is sent
        return Reduction(max(1, total), total)
