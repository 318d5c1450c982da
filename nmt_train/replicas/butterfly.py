"""Butterfly all-reduce: recursive halving and doubling (Thakur, Rabenseifner & Gropp 2005, Section 4.4).

Ranks exchange in pairs that are n/2, n/4, ..., 1 apart: each sends half of its part of the vector, adds the half that it
receives, and keeps this half. At the end, each rank has the sum of one block. It encodes this sum, and the blocks return by the
opposite way. All ranks decode the same messages, so sums have the same bits on every rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nmt_train.common.message import Message
from nmt_train.replicas.reducer import EncodingReducer, Reduction


class ButterflyAllReduce(EncodingReducer):
    """With n ranks, it takes 2 log2(n) rounds instead of a ring's 2 (n - 1), and if n is a power of two, sends as many bytes.

    Otherwise, the ranks beyond one first send their whole vectors to others, and receive the sum at the end; these others
    then send up to 1.6 times as many bytes as in a ring.
    """

    @torch.no_grad()
    def reduce(self, vector: Tensor, update: int, weight: int = 1) -> Reduction:
        size, rank = self._transport.size, self._transport.rank
        if size == 1:
            return Reduction(1.0, weight)
        if weight != 1:
            vector.mul_(weight)
        paired = 1 << (size.bit_length() - 1)  # ranks that take part in the pairs
        blocks = [vector[len(vector) * part // paired : len(vector) * (part + 1) // paired] for part in range(paired)]
        if rank >= paired:
            done = self._send(rank - paired, self._encode(vector, update, weight))
            total = min(self._take(rank - paired, block, add=False).number(1) for block in blocks)  # all have the same
            done.result()
            return Reduction(max(1, total), total)
        if rank + paired < size:
            weight += self._take(rank + paired, vector, add=True).number(1)
        found, total = self._halve_and_double(vector, blocks, update, weight)
        if rank + paired < size:
            for done in [self._send(rank + paired, found[block]) for block in range(paired)]:
                done.result()
        return Reduction(max(1, total), total)

    def _halve_and_double(
        self, vector: Tensor, blocks: list[Tensor], update: int, weight: int
    ) -> tuple[dict[int, Message], int]:
        """Add up among the paired ranks; returns the message with the sum of each block, and the total weight."""
        rank, paired = self._transport.rank, len(blocks)
        sent, first, apart = [], 0, paired // 2
        while apart:
            kept, other = (first + apart, first) if rank & apart else (first, first + apart)
            own, given = (
                vector[len(vector) * start // paired : len(vector) * (start + apart) // paired] for start in (kept, other)
            )
            sent.append(self._send(rank ^ apart, self._encode(given, update, weight)))
            weight += self._take(rank ^ apart, own, add=True).number(1)
            first, apart = kept, apart // 2
        found = {rank: self._encode(blocks[rank], update, weight)}
        self._decode(found[rank], blocks[rank])
        apart = 1
        while apart < paired:
            sent += [self._send(rank ^ apart, found[block]) for block in sorted(found)]
            found |= {block ^ apart: self._take(rank ^ apart, blocks[block ^ apart], add=False) for block in sorted(found)}
            apart *= 2
        for done in sent:
            done.result()  # the caller must not overwrite the vector before it is sent
        return found, weight
