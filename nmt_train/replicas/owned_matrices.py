"""Muon where the owner is: each matrix has one rank that keeps its momentum and orthogonalizes it for all ranks.

In the middle of an all-reduce, one rank has the mean of each part of the gradient. It does the optimizer's work for the
matrices in this part, and the second half of the all-reduce sends the resulting directions instead of the mean. What a lossy
codec leaves out of a direction is added to the next one, as in EF21-Muon (Gruntkowska et al. 2025).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nmt_train.common.message import Message
from nmt_train.optim.flat_model import FlatModel, cpu_copy
from nmt_train.optim.muon import Matrix, by_shape, directions, muon_cost
from nmt_train.optim.optimizer import Optimizer
from nmt_train.strategy.state import Vectors
from nmt_train.trace import Trace
from nmt_train.transport import Messages, Tag

_RANKS, _LEFT_OUT = "ranks", "left-out-of-matrix-"


class OwnedMatrices:
    """The matrices of a model; this rank owns those that it is asked to `direct`.

    An update changes momenta, and what was left out, only by `complete`. Every exchange directs the same matrices, so that one
    which was interrupted, or not applied, is overwritten by the next.
    """

    def __init__(self, flat: FlatModel, optimizer: Optimizer, transport: Messages, trace: Trace) -> None:
        """optimizer: it is told that gradients of matrices are directions from now on."""
        self.matrices = flat.matrices()
        self._momenta, self._momentum = optimizer.take_directions(), optimizer.config.momentum
        self._transport, self._trace = transport, trace
        self._left_out: dict[Matrix, Tensor] = {}
        self._next_momenta: dict[Matrix, Tensor] = {}
        self._next_left_out: dict[Matrix, Tensor] = {}

    @property
    def owned(self) -> list[Matrix]:
        """Those that this rank has directed, in their order."""
        return [matrix for matrix in self.matrices if matrix in self._next_momenta]

    @torch.no_grad()
    def direct(self, mean: Tensor, start: int) -> None:
        """Replace the gradients of all matrices in this part of the mean gradient, which begins at `start`, by directions."""
        mine = self._within(mean, start)
        with self._trace.span("update", muon_cost(0, mine)):
            if self._momenta is None:
                return
            for alike in by_shape(mine):
                gradients = [matrix.in_part(start).of(mean) for matrix in alike]
                momenta = [matrix.of(self._momenta).clone() for matrix in alike]
                found = directions(gradients, momenta, self._momentum)
                for matrix, gradient, direction in zip(alike, gradients, found, strict=True):
                    gradient.copy_(direction)
                    if matrix in self._left_out:
                        gradient += self._left_out[matrix]
                self._next_momenta.update(zip(alike, momenta, strict=True))

    def take_left_out(self, left_out: Tensor, start: int, scale: float) -> None:
        """Keep what a codec left out of directions, and leave zeros there.

        left_out: `scale` times what was left out of the part that begins at `start`.
        """
        for matrix in self._within(left_out, start):
            values = matrix.in_part(start).of(left_out)
            self._next_left_out[matrix] = values / scale
            values.zero_()

    def complete(self) -> None:
        """Called when all parts have been reduced, and the update takes place."""
        if self._momenta is not None:
            for matrix, momentum in self._next_momenta.items():
                matrix.of(self._momenta).copy_(momentum)
            self._left_out |= self._next_left_out

    def share_momenta(self) -> None:
        """Send rank 0, whose optimizer state checkpoints contain, the momenta of all matrices. Called on all ranks."""
        if self._momenta is None:
            return
        if self._transport.rank:
            numbers = tuple(map(self.matrices.index, self.owned))
            momenta = [matrix.of(self._momenta).flatten() for matrix in self.owned]
            packed = cpu_copy(torch.cat([self._momenta[:0], *momenta]))
            self._transport.send(0, Tag.STATE, Message(numbers, (packed,))).result()
            return
        for rank in range(1, self._transport.size):
            message: Message = self._transport.receive(rank, Tag.STATE).result()[1]
            with message.understood():
                theirs = [self.matrices[number] for number in message.numbers]
            sizes = [matrix.stop - matrix.start for matrix in theirs]
            for matrix, values in zip(theirs, message.vector(sum(sizes)).split(sizes), strict=True):
                self._momenta[matrix.start : matrix.stop] = values

    def state(self) -> Vectors:
        """What was left out of the directions of the matrices that this rank owns."""
        left_out = {f"{_LEFT_OUT}{matrix.start}": values.flatten() for matrix, values in self._left_out.items()}
        return {_RANKS: torch.tensor([self._transport.size]), **left_out} if left_out else {}

    def load(self, vectors: Mapping[str, Tensor]) -> None:
        """Continue from what `state` returned on this rank, unless the number of ranks, and so the owners, have changed."""
        self._left_out = {}
        if _RANKS in vectors and int(vectors[_RANKS]) == self._transport.size and self._momenta is not None:
            for matrix in self.matrices:
                if (values := vectors.get(f"{_LEFT_OUT}{matrix.start}")) is not None:
                    self._left_out[matrix] = values.to(self._momenta).view(matrix.rows, matrix.columns)

    def _within(self, part: Tensor, start: int) -> list[Matrix]:
        return [matrix for matrix in self.matrices if start <= matrix.start and matrix.stop <= start + part.numel()]
