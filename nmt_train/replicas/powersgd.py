"""All-reduce of gradients as products of two low-rank factors (PowerSGD, Vogels et al. 2019, Algorithms 1 and 2)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nmt_train.replicas.all_reduce import AllReduce
from nmt_train.replicas.reducer import Reducer, Reduction, StagedReducer
from nmt_train.strategy.background import BackgroundTask, Stages, in_one_stage
from nmt_train.strategy.config import LowRankConfig
from nmt_train.strategy.context import BuildContext
from nmt_train.strategy.plan import ReplicasPlan
from nmt_train.strategy.state import Vectors
from nmt_train.trace import Trace
from nmt_train.transport import Tasks

_Q = "low-rank.q"  # name of the right factors in `state`
_SEED = 20_190_531  # seeds the initial right factors, which are the same on all ranks


class _Matrix(NamedTuple):
    """place: its elements in the vector. factor: those of its right factor in the vector of all right factors."""

    place: slice
    rows: int
    columns: int
    factor: slice

    def of(self, vector: Tensor, start: int) -> Tensor:
        """Its elements (rows, columns) in a part of the vector that begins at `start`."""
        return vector[self.place.start - start : self.place.stop - start].view(self.rows, self.columns)

    def right(self, factors: Tensor) -> Tensor:
        """Its right factor (columns, rank) in the vector of all right factors."""
        return factors[self.factor].view(self.columns, -1)


class _Part(NamedTuple):
    """A part of a vector, which begins at `start`: its matrices, and the places of its other parameters.

    A vector on the device `meta` has no values, so its products have only sizes; torch would need milliseconds to derive them.
    """

    vector: Tensor
    start: int
    rank: int
    matrices: list[_Matrix]
    others: list[slice]

    def first(self, factors: Tensor) -> Tensor:
        """P = M Q of all matrices, and the other parameters; factors: all right factors."""
        if self.vector.is_meta:
            return self.vector.new_empty(sum(self._sizes()))
        products = (matrix.of(self.vector, self.start) @ matrix.right(factors) for matrix in self.matrices)
        return _joined([*products, *(self.vector[other] for other in self.others)], self.vector)

    def _sizes(self) -> list[int]:
        return [*(matrix.rows * self.rank for matrix in self.matrices), *(its.stop - its.start for its in self.others)]

    def split(self, first: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """P (rows, rank) of every matrix, made orthonormal, and the other parameters.

        Those with the same number of rows are made orthonormal together: one launch on a GPU instead of one for each.
        """
        if self.vector.is_meta:
            return [], []
        found, count = first.split(self._sizes()), len(self.matrices)
        left = [p.view(matrix.rows, -1) for matrix, p in zip(self.matrices, found[:count], strict=True)]
        for rows in {matrix.rows for matrix in self.matrices}:
            alike = [number for number, matrix in enumerate(self.matrices) if matrix.rows == rows]
            for number, p in zip(alike, _orthonormal(torch.stack([left[number] for number in alike])), strict=True):
                left[number] = p
        return left, list(found[count:])

    def second(self, left: Sequence[Tensor]) -> Tensor:
        """Q = M^T P of all matrices."""
        if self.vector.is_meta:
            return self.vector.new_empty(sum(matrix.columns * self.rank for matrix in self.matrices))
        products = (matrix.of(self.vector, self.start).T @ p for matrix, p in zip(self.matrices, left, strict=True))
        return _joined([*products], self.vector)

    def reconstruct(self, left: Sequence[Tensor], factors: Tensor, others: Sequence[Tensor], error: Tensor) -> None:
        """Replace every matrix by P Q^T and the other parameters by `others`; set `error` to what this leaves out."""
        if self.vector.is_meta:
            return
        error.copy_(self.vector)
        for matrix, p in zip(self.matrices, left, strict=True):
            matrix.of(self.vector, self.start).copy_(p @ matrix.right(factors).T)
        for place, mean in zip(self.others, others, strict=True):
            self.vector[place] = mean
        error.sub_(self.vector)
        for place in self.others:
            error[place] = 0


class LowRankReducer(StagedReducer):
    """Approximates the mean of every gradient matrix M over all ranks by P Q^T.

    It averages P = M Q over the ranks and makes P orthonormal; then it averages Q = M^T P. Error feedback adds what P Q^T
    leaves out of a rank's gradient to the next gradient of that rank.

    A vector may be reduced in parts, which end between parameters. A task does all sums of factors one after the other, so that
    those of one part are computed while those of another are in the network. Residuals and right factors change when the last
    part has been reduced. An interrupted exchange, or a mean that is not finite, leaves them unchanged.

    layout: names and shapes of the parameters in the order of the vector. Parameters that are not matrices, or too small to
    benefit, are averaged without compression. inner: the reducer for the factors and the uncompressed parameters.
    """

    keeps_residual_until_complete = True

    @classmethod
    def build(cls, context: BuildContext, settings: ReplicasPlan) -> Reducer:
        flat, inner = context.flat, AllReduce.build(context, settings)
        tasks = None if context.transport.size == 1 else context.transport
        return cls(inner, flat.layout, settings.low_rank, flat.gradient, context.trace, tasks)

    def __init__(
        self, inner: Reducer, layout: Sequence[tuple[str, tuple[int, ...]]], config: LowRankConfig, like: Tensor, trace: Trace,
        tasks: Tasks | None,
    ) -> None:  # fmt: skip
        """like: a vector of the model's size and device. tasks: None if there are no other ranks, so nothing is compressed."""
        self._inner, self._rank, self._dense, self._trace = inner, config.rank, config.dense_updates, trace
        self._sums: BackgroundTask[Reduction] | None = None
        if tasks is not None:
            self._sums = BackgroundTask(tasks, trace, in_one_stage(inner.reduce), name="sums of factors")
        self._matrices: list[_Matrix] = []
        self._others: list[slice] = []
        start = factors = 0
        for _, shape in layout:
            elements = torch.Size(shape).numel()
            place, rows = slice(start, start + elements), shape[0] if len(shape) > 1 else 1
            start += elements
            columns = elements // max(1, rows)
            if self._rank * (rows + columns) < elements:
                factor = slice(factors, factors := factors + self._rank * columns)
                self._matrices.append(_Matrix(place, rows, columns, factor))
            else:
                self._others.append(place)
        self._ends = sorted(place.stop for place in (*self._others, *(matrix.place for matrix in self._matrices)))
        self._error, self._next_error = torch.zeros_like(like), torch.zeros_like(like)
        self._q = torch.randn(factors, generator=torch.Generator().manual_seed(_SEED)).to(like)
        self._next_q = self._q.clone()
        self._begin()

    def _begin(self) -> None:
        """Begin a new vector."""
        self._reduced = 0  # elements that have been reduced
        self._finite = self._q.new_ones((), dtype=torch.bool)  # whether the means of these elements are finite

    def parts(self, elements: int, most: int) -> list[slice]:
        """As equal in size as whole parameters permit."""
        whole = self._ends[-1]

        def nearest(place: float) -> int:
            return min(self._ends, key=lambda end: abs(end - place))

        cuts = {0, whole, *(nearest(whole * part / most) for part in range(1, most))}
        return [slice(start, stop) for start, stop in itertools.pairwise(sorted(cuts))]

    @torch.no_grad()
    def stages(self, vector: Tensor, update: int, weight: int = 1, start: int = 0) -> Stages[Reduction]:
        """Three stages: compute P, compute Q from the mean of P, compute P Q^T from the mean of Q."""
        if update < self._dense or self._sums is None:
            return self._inner.reduce(vector, update, weight)
        place, part = slice(start, start + vector.numel()), self._part(vector, start)
        with self._trace.span("encode", vector.numel()):
            if weight:  # without a batch, the residual waits for the next gradient
                vector.add_(self._error[place])
            first = part.first(self._q)
        self._sums.give(first, update, weight)
        yield
        done, joined = self._sums.take()
        assert done is first, "parts must pass their stages in the order of BackgroundTask"
        first.div_(joined.divisor)
        with self._trace.span("encode", vector.numel()):
            left, others = part.split(first)
            second = part.second(left)
        self._sums.give(second, update, weight)
        yield
        done, _ = self._sums.take()
        assert done is second, "parts must pass their stages in the order of BackgroundTask"
        if part.matrices:
            self._next_q[part.matrices[0].factor.start : part.matrices[-1].factor.stop] = second.div_(joined.divisor)
        if not vector.is_meta:
            self._finite &= torch.isfinite(first).all() & torch.isfinite(second).all()
        with self._trace.span("decode", vector.numel()):
            part.reconstruct(left, self._next_q, others, self._next_error[place])
        self._reduced += vector.numel()
        if self._reduced == self._error.numel():
            self._complete(bool(weight))
        return Reduction(1.0, joined.weight)

    def _part(self, vector: Tensor, start: int) -> _Part:
        end = start + vector.numel()
        others = [slice(its.start - start, its.stop - start) for its in self._others if start <= its.start < end]
        matrices = [matrix for matrix in self._matrices if start <= matrix.place.start < end]
        return _Part(vector, start, self._rank, matrices, others)

    def _complete(self, contributed: bool) -> None:
        """Called when all parts have been reduced; contributed: whether this rank had a batch.

        All ranks know alike whether the mean is finite.
        """
        if self._finite.is_meta or self._finite:
            self._q, self._next_q = self._next_q, self._q
            if contributed:
                self._error, self._next_error = self._next_error, self._error
        self._begin()

    @property
    def residual(self) -> Tensor | None:
        return None if self._sums is None else self._error

    def state(self) -> Vectors:
        return {_Q: self._q}

    def load(self, vectors: Mapping[str, Tensor]) -> None:
        self._begin()
        if _Q in vectors and vectors[_Q].shape == self._q.shape:
            self._q = vectors[_Q].to(self._q)


def _joined(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([part.flatten() for part in parts]) if parts else like.new_empty(0)


def _orthonormal(matrices: Tensor) -> Tensor:
    """Make the columns of every matrix (matrices, rows, columns) orthonormal in place, one after the other (Gram-Schmidt)."""
    for column in range(matrices.shape[2]):
        one = matrices[:, :, column : column + 1]
        one.div_(one.norm(dim=1, keepdim=True).clamp(min=torch.finfo(one.dtype).tiny))
        if column + 1 < matrices.shape[2]:
            others = matrices[:, :, column + 1 :]
            others.sub_(one @ (one.mT @ others))
    return matrices
