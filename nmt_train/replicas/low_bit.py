"""All-reduce of gradients in one to eight bits per element (Zheng et al. 2019, Algorithm 2; Tang et al. 2019, DoubleSqueeze).

Every rank owns a share of the vector. Of this share, it receives what the others have, compressed, computes the mean,
compresses it, and sends it to all. Both compressions have error feedback.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nmt_train.codec.codec import Codec
from nmt_train.codec.levels import FOUR_BITS, Levels
from nmt_train.codec.low_bit_for import low_bit_for
from nmt_train.codec.size_only import SizeOnly
from nmt_train.common.message import Message
from nmt_train.optim.flat_model import add
from nmt_train.optim.muon import Matrix
from nmt_train.replicas.owned_matrices import OwnedMatrices
from nmt_train.replicas.reducer import FINITE, NO_BATCH, NOT_FINITE, Reducer, Reduction, StagedReducer, encoded
from nmt_train.strategy.background import Stages
from nmt_train.strategy.config import LowBitConfig
from nmt_train.strategy.context import BuildContext
from nmt_train.strategy.plan import ReplicasPlan
from nmt_train.trace import Trace
from nmt_train.transport import Messages, Tag


class _Share(NamedTuple):
    """What one rank owns of a vector, or of a bucket of it. place: in the bucket. up, down: the codecs of both directions."""

    place: slice
    up: Codec
    down: Codec


class LowBitReducer(StagedReducer):
    """Approximates the mean over all ranks; what both compressions leave out stays in the residuals.

    A rank adds its residual to its vector. The share that it owns needs no compression on the way up. What the compressed mean
    leaves out of this share becomes the owner's residual, times the number of ranks, so that it adds as much to the next mean
    (if all ranks have the same weight).

    A vector may be reduced in buckets, which end between rows of matrices, and in stages. Residuals change when the last bucket
    has been reduced, and by `add_late`. An interrupted exchange, or a mean that is not finite, leaves them unchanged.

    layout: names and shapes of the parameters in the order of the vector.
    """

    codecs = "own"
    keeps_residual_until_complete = True
    has_owners = True

    @classmethod
    def build(cls, context: BuildContext, settings: ReplicasPlan) -> Reducer:
        flat = context.flat
        return cls(context.transport, flat.layout, settings.low_bit, flat.gradient, context.trace)

    def __init__(
        self,
        transport: Messages,
        layout: Sequence[tuple[str, tuple[int, ...]]],
        config: LowBitConfig,
        like: Tensor,
        trace: Trace,
    ) -> None:
        """like: a vector of the model's size and device."""
        self._transport, self._config, self._trace, self._meta = transport, config, trace, like.is_meta
        self._matrices: list[tuple[int, int, int]] = []  # start in the vector, rows, columns
        start = 0
        for _, shape in layout:
            rows, elements = shape[0] if len(shape) > 1 else 1, torch.Size(shape).numel()
            self._matrices.append((start, rows, elements // max(1, rows)))
            start += elements
        self._units = self._matrices  # what cuts must not divide: rows or, if a matrix has an owner, the whole matrix
        self._owned: OwnedMatrices | None = None
        self._residual, self._next_residual = torch.zeros_like(like), torch.zeros_like(like)
        self._reduced, self._finite = 0, True  # of the present vector: elements reduced so far; whether all means were finite
        self._scratch = like.new_empty(3, 0)  # of the codecs
        self._kind = low_bit_for(like.device)
        self._shares: dict[tuple[int, int], list[_Share]] = {}  # of all ranks, by the bucket
        rank, size = transport.rank, transport.size
        self._others = [*range(rank + 1, size), *range(rank)]

    def own(self, matrices: OwnedMatrices) -> None:
        self._owned, owned = matrices, {matrix.start: matrix for matrix in matrices.matrices}
        self._matrices = [part for matrix in self._matrices for part in _separate(matrix, owned)]
        self._units = [(start, 1, rows * columns) if start in owned else (start, rows, columns)
                       for start, rows, columns in self._matrices]  # fmt: skip
        self._shares.clear()

    def parts(self, elements: int, most: int) -> list[slice]:
        """As equal in size as whole rows permit."""
        return [place for place in self._cut(slice(0, elements), most) if place.start < place.stop]

    def _cut(self, place: slice, parts: int) -> list[slice]:
        """Cut a bucket between rows into this number of slices, some of which may be empty."""
        length = place.stop - place.start
        inner = [self._nearest(place.start + length * part // parts) for part in range(1, parts)]
        ends = [place.start, *(min(max(end, place.start), place.stop) for end in inner), place.stop]
        return [slice(*pair) for pair in itertools.pairwise(ends)]

    def _nearest(self, place: int) -> int:
        """The end of a row, or of an owned matrix, nearest to an element."""
        start, rows, columns = self._units[bisect.bisect_right(self._units, (place, math.inf)) - 1]
        return start + min(rows, round((place - start) / max(1, columns))) * columns

    def _shares_of(self, place: slice) -> list[_Share]:
        found = self._shares.get((place.start, place.stop))
        if found is None:
            shares = self._cut(place, self._transport.size)
            largest = max(share.stop - share.start for share in shares)
            if self._scratch.shape[1] < largest:
                self._scratch = self._residual.new_empty(3, largest)
                self._shares.clear()  # their codecs would keep the smaller one
            found = self._shares[place.start, place.stop] = [
                _Share(slice(share.start - place.start, share.stop - place.start), *self._codecs(share)) for share in shares
            ]
        return found

    def _codecs(self, place: slice) -> list[Codec]:
        shapes = []
        for start, rows, columns in self._matrices:
            elements = min(place.stop, start + rows * columns) - max(place.start, start)
            if elements > 0:
                shapes.append((elements // columns, columns))
        both = (self._config.up, self._config.down)
        made = [(Levels if values >= FOUR_BITS else self._kind)(shapes, values, self._scratch) for values in both]
        return [SizeOnly(codec) for codec in made] if self._meta else list(made)

    @torch.no_grad()
    def stages(self, vector: Tensor, update: int, weight: int = 1, start: int = 0) -> Stages[Reduction]:
        """Three stages: send, average, receive means; it yields between them."""
        if not self._others:
            return Reduction(divisor=1.0, weight=weight)
        place = slice(start, start + vector.numel())
        shares, left_out = self._shares_of(place), self._next_residual[place]
        sent = self._send_up(vector, self._residual[place], left_out, shares, update, weight)
        yield
        mean, total = self._mean(vector, start, left_out, shares[self._transport.rank], update, weight)
        sent += [self._transport.send(rank, Tag.MEAN, mean) for rank in self._others]
        yield
        means = self._receive(Tag.MEAN)
        with self._trace.span("decode", sum(vector[shares[rank].place].numel() for rank in means)):
            for rank, message in means.items():
                into = vector[shares[rank].place]
                if self._finite_or_nan(message, into):
                    shares[rank].down.decode(message.without_numbers(2).on(into.device), into)
        for done in sent:
            done.result()
        self._reduced += vector.numel()
        if self._reduced == self._residual.numel():
            self._complete()
        return Reduction(divisor=1.0, weight=total)

    def _send_up(
        self, vector: Tensor, residual: Tensor, left_out: Tensor, shares: Sequence[_Share], update: int, weight: int
    ) -> list[Any]:
        """Add the residual to `vector`, and send each other rank its share; `left_out` becomes the new residual."""
        if not weight:  # without a batch, the residual waits for the next gradient
            left_out.copy_(residual)
            return [self._transport.send(rank, Tag.REDUCE, Message((NO_BATCH, 0))) for rank in self._others]
        sent, own = list[Any](), shares[self._transport.rank].place
        for rank in self._others:
            place = shares[rank].place
            with self._trace.span("encode", place.stop - place.start):
                # Just before it is encoded, so that it is still in the cache; the own share with the first.
                for part in [place] if sent else [own, place]:
                    add(vector[part], residual[part], out=vector[part])
                message = encoded(shares[rank].up, vector[place], update, weight)
                if message.number() == FINITE:
                    shares[rank].up.left_out(message.without_numbers(2), vector[place], left_out[place])
            sent.append(self._transport.send(rank, Tag.REDUCE, message))
        return sent

    def _mean(
        self, vector: Tensor, start: int, left_out: Tensor, mine: _Share, update: int, weight: int
    ) -> tuple[Message, int]:
        """Receive what the others have of this rank's share; return the encoded mean, and the total weight.

        In this share, `vector` becomes the decoded mean, and `left_out` what the mean leaves out, times the number of ranks.
        start: the first element of the vector in the parameters.
        """
        own, own_left_out, messages = vector[mine.place], left_out[mine.place], self._receive(Tag.REDUCE)
        total = weight + sum(message.number(1) for message in messages.values())
        with self._trace.span("decode", own.numel() * len(messages)):
            own.mul_(weight / max(1, total))
            for message in messages.values():
                if message.number() == FINITE:
                    mine.up.add(message.without_numbers(2).on(own.device), own, scale=message.number(1) / max(1, total))
                elif message.number() == NOT_FINITE:
                    own.fill_(torch.nan)
        first = start + mine.place.start
        if self._owned is not None:
            self._owned.direct(own, first)
        with self._trace.span("encode", own.numel()):
            message = encoded(mine.down, own, update, total)
            if self._finite_or_nan(message, own):
                new = own_left_out if weight else torch.empty_like(own_left_out)
                mine.down.split(message.without_numbers(2), own, new, scale=self._transport.size)
                if self._owned is not None:
                    self._owned.take_left_out(new, first, self._transport.size)
                if not weight:  # it has the old residual, which waits for the next gradient
                    own_left_out.add_(new)
        return message, total

    def _finite_or_nan(self, mean: Message, into: Tensor) -> bool:
        """Whether the mean is finite. If it is not, `into` becomes NaN, and the exchange counts as not finite."""
        if mean.number() == FINITE:
            return True
        into.fill_(torch.nan)
        self._finite = False
        return False

    def _receive(self, tag: Tag) -> dict[int, Message]:
        coming = {rank: self._transport.receive(rank, tag) for rank in self._others}
        with self._trace.span("waiting"):
            return {rank: future.result()[1] for rank, future in sorted(coming.items())}

    def _complete(self) -> None:
        """Called when all buckets have been reduced. All ranks know alike whether the mean is finite."""
        if self._finite:
            self._residual, self._next_residual = self._next_residual, self._residual
        self._reduced, self._finite = 0, True

    @property
    def residual(self) -> Tensor | None:
        return self._residual if self._others else None

    def load(self, vectors: Mapping[str, Tensor]) -> None:
        """Forget an interrupted sum; the strategy loads the residual."""
        self._reduced, self._finite = 0, True


def _separate(matrix: tuple[int, int, int], owned: Mapping[int, Matrix]) -> list[tuple[int, int, int]]:
    """Its parts, if it joins several owned matrices, one above the other. All of them: start in the vector, rows, columns."""
    start, rows, columns = matrix
    height = owned[start].rows if start in owned else rows
    return [(start + above * columns, height, columns) for above in range(0, rows, height or 1)] or [matrix]
