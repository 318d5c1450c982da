"""All-reduce of gradients as products of two low-rank factors (PowerSGD, Vogels et al. 2019, Algorithms 1 and 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from nmt_train.common.section import STRICT
from nmt_train.distributed.context import BuildContext
from nmt_train.distributed.exchange.all_reduce import AllReduce
from nmt_train.distributed.exchange.reducer import Reducer, Reduction
from nmt_train.distributed.exchange.worker_state import RESIDUAL, Vectors
from nmt_train.trace import Trace

_Q = "low-rank.q"  # name of the right factors in a worker's state
_SEED = 20_190_531  # seeds the initial right factors, which are the same on all ranks


@dataclass(frozen=True, config=STRICT)
class LowRankConfig:
    """Low-rank compression (PowerSGD, Vogels et al. 2019)."""

    rank: int = Field(default=1, ge=1, le=1024, description="rank of the approximation: number of columns of each factor")
    dense_updates: int = Field(
        default=0,
        ge=0,
        le=10**9,
        description="updates at the start of training with gradients that are not compressed [updates]",
    )


class PowerSGD(AllReduce):
    """All-reduce of low-rank factors of the gradient matrices; the codec encodes the factors."""

    in_parts = False  # whole matrices are needed
    averages = True

    def _make_reducer(self, context: BuildContext) -> Reducer:
        flat, config = context.flat, context.settings.low_rank
        return LowRankReducer(super()._make_reducer(context), flat.layout, config, flat.gradient, context.trace)


class LowRankReducer(Reducer):
    """Approximates the mean of every gradient matrix M over all ranks by P Q^T.

    It averages P = M Q over the ranks and makes P orthonormal; then it averages Q = M^T P. Error feedback adds what P Q^T
    leaves out of a rank's gradient to the next gradient of that rank.

    layout: names and shapes of the parameters in the order of the vector. Parameters that are not matrices, or too small to
    benefit, are averaged without compression. inner: the reducer for the factors and the uncompressed parameters.
    """

    def __init__(
        self, inner: Reducer, layout: Sequence[tuple[str, tuple[int, ...]]], config: LowRankConfig, like: Tensor, trace: Trace
    ) -> None:
        """like: a vector of the model's size and device."""
        self._inner, self._rank, self._dense, self._trace = inner, config.rank, config.dense_updates, trace
        self._matrices: list[tuple[slice, int, int]] = []
        self._others: list[slice] = []
        start = 0
        for _, shape in layout:
            elements = torch.Size(shape).numel()
            place, rows = slice(start, start + elements), shape[0] if len(shape) > 1 else 1
            start += elements
            if self._rank * (rows + elements // max(1, rows)) < elements:
                self._matrices.append((place, rows, elements // rows))
            else:
                self._others.append(place)
        self._error = torch.zeros_like(like)
        columns = sum(columns for _, _, columns in self._matrices)
        random = torch.randn(self._rank * columns, generator=torch.Generator().manual_seed(_SEED))
        self._q = random.to(like)

    @torch.no_grad()
    def reduce(self, vector: Tensor, update: int, weight: int = 1) -> Reduction:
        if update < self._dense:
            return self._inner.reduce(vector, update, weight)
        with self._trace.span("encode", vector.numel()):
            if weight:  # without a batch, the residual waits for the next gradient
                vector.add_(self._error)
            left = [vector[place].view(rows, columns) @ q for (place, rows, columns), q in self._with_q()]
            first = _joined([*left, *(vector[place] for place in self._others)], vector)
        joined = self._inner.reduce(first, update, weight)
        first.div_(joined.divisor)
        with self._trace.span("encode", vector.numel()):
            sizes = [*(p.numel() for p in left), *(place.stop - place.start for place in self._others)]
            parts = list(first.split(sizes))
            left = [_orthonormal(part.view(p.shape)) for part, p in zip(parts, left, strict=False)]
            right = [
                vector[place].view(rows, columns).T @ p for (place, rows, columns), p in zip(self._matrices, left, strict=True)
            ]
            second = _joined(right, vector)
        self._inner.reduce(second, update, weight)
        self._q = second.div_(joined.divisor)
        with self._trace.span("decode", vector.numel()):
            if weight:
                self._error.copy_(vector)
            for ((place, _, _), q), p in zip(self._with_q(), left, strict=True):
                vector[place] = (p @ q.T).flatten()
            for place, part in zip(self._others, parts[len(left) :], strict=True):
                vector[place] = part
            if weight:
                self._owe(vector)
        if not self._q.is_meta and not torch.isfinite(self._q).all():
            self._forget()
        return Reduction(1.0, joined.weight)

    def _owe(self, mean: Tensor) -> None:
        """Subtract `mean` from this rank's saved vector; the rest is the residual."""
        for place, _, _ in self._matrices:
            self._error[place].sub_(mean[place])
        for place in self._others:
            self._error[place] = 0

    def _with_q(self) -> list[tuple[tuple[slice, int, int], Tensor]]:
        """Each matrix with its right factor (columns, rank)."""
        factors = self._q.split([self._rank * columns for _, _, columns in self._matrices])
        return [(its, q.view(-1, self._rank)) for its, q in zip(self._matrices, factors, strict=True)]

    def _forget(self) -> None:
        """Reset residual and right factors, on all ranks alike, after a sum that was not finite."""
        self._error.zero_()
        self._q = torch.randn(self._q.shape, generator=torch.Generator().manual_seed(_SEED)).to(self._q)

    def worker_state(self) -> Vectors:
        return {RESIDUAL: self._error, _Q: self._q}

    def rescued(self) -> Vectors:
        return {RESIDUAL: self._error}

    def load_worker_state(self, vectors: Mapping[str, Tensor]) -> None:
        """Restore the right factors; the exchange itself adds the saved residual to the next gradient."""
        self._error.zero_()
        if _Q in vectors and vectors[_Q].shape == self._q.shape:
            self._q = vectors[_Q].to(self._q)


def _joined(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([part.flatten() for part in parts]) if parts else like.new_empty(0)


def _orthonormal(matrix: Tensor) -> Tensor:
    """Make the columns orthonormal in place, one after the other (Gram-Schmidt)."""
    if matrix.is_meta:  # no values to compute; torch would need milliseconds to derive their sizes
        return matrix
    for column in range(matrix.shape[1]):
        its = matrix[:, column]
        its.div_(its.norm().clamp(min=torch.finfo(its.dtype).tiny))
        if column + 1 < matrix.shape[1]:
            others = matrix[:, column + 1 :]
            others.sub_(its[:, None] * (its @ others)[None])
    return matrix
