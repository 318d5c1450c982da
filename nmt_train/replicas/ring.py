"""Ring all-reduce (Patarasu & Yuan 2009), whose sums have the same bits on every rank.

The vector is cut into as many blocks as there are ranks. The partial sum of a block passes from rank to rank, always in the
same order. The last rank encodes the sum, and all ranks, including that one, decode the same message. Therefore a codec rounds
the sum in the same way on every rank.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from nmt_train.optim.muon import beside
from nmt_train.replicas.owned_matrices import OwnedMatrices
from nmt_train.replicas.reducer import EncodingReducer, Reduction
from nmt_train.strategy.background import Stages


class RingAllReduce(EncodingReducer):
    """Each of n ranks sends 2 (n - 1) / n of the vector and receives as much; `codec` encodes each partial sum at every hop."""

    has_owners = True
    _owned: OwnedMatrices | None = None

    def own(self, matrices: OwnedMatrices) -> None:
        self._owned = matrices

    def parts(self, elements: int, most: int) -> list[slice]:
        cuts = [0, *(self._cut(part.stop) for part in super().parts(elements, most))]
        return [slice(start, stop) for start, stop in itertools.pairwise(cuts) if start < stop]

    def stages(self, vector: Tensor, update: int, weight: int = 1, start: int = 0) -> Stages[Reduction]:
        yield from ()
        return self.reduce(vector, update, weight, start)

    @torch.no_grad()
    def reduce(self, vector: Tensor, update: int, weight: int = 1, start: int = 0) -> Reduction:
        size, rank = self._transport.size, self._transport.rank
        following, before = (rank + 1) % size, (rank - 1) % size
        if size == 1:
            return Reduction(1.0, weight)
        if weight != 1:
            vector.mul_(weight)
        cuts = [self._cut(start + len(vector) * part // size) - start for part in range(size + 1)]
        blocks = [vector[first:last] for first, last in itertools.pairwise(cuts)]
        sent, total = [], weight
        for hop in range(size - 1):
            sent.append(self._send(following, self._encode(blocks[(rank - hop) % size], update, total)))
            total = weight + self._take(before, blocks[(rank - hop - 1) % size], add=True).number(1)
        mine, divisor = (rank + 1) % size, max(1, total)
        if self._owned is not None:
            self._owned.direct(blocks[mine].div_(divisor), start + cuts[mine])
            divisor = 1
        message = self._encode(blocks[mine], update, total)
        self._decode(message, blocks[mine])
        for hop in range(size - 1):
            sent.append(self._send(following, message))
            message = self._take(before, blocks[(mine - hop - 1) % size], add=False)
        for done in sent:
            done.result()  # the caller must not overwrite the vector before it is sent
        return Reduction(divisor, total)

    def _cut(self, place: int) -> int:
        """This place in the parameters, or the nearest one outside the matrices that have owners."""
        return place if self._owned is None else beside(self._owned.matrices, place)
