"""Muon: an orthogonalized momentum for the matrices of layers, and Adam for everything else (Jordan et al. 2024).

Updates of matrices are scaled to the root mean square that Adam's usually have (Liu et al. 2025, section 2.2), so that one
learning rate suits both. The norm of a gradient is limited (`optimizer.clip_norm`) without these matrices, whose updates have
the same size whatever their gradients have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

# Of the polynomial of Newton-Schulz: the steepest at zero that keep singular values within about 0.7 to 1.2.
_COEFFICIENTS = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5
_RMS = 0.2  # of Adam's updates, as a multiple of the learning rate
_TINY = 1e-7
_FLOPS = 200  # that take as long as the update of one element by Adam, on a core of a CPU


class Matrix(NamedTuple):
    """A matrix in a flat vector: `rows` times `columns` elements from `start`."""

    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns

    def in_part(self, start: int) -> Matrix:
        """Its place in a part of the vector that begins at `start`."""
        return self._replace(start=self.start - start)

    def of(self, vector: Tensor) -> Tensor:
        """Its elements, a view (rows, columns)."""
        return vector[self.start : self.stop].view(self.rows, self.columns)


class Muon:
    """An optimizer with the interface of torch's, over one flat parameter (elements,).

    Both of its vectors are as long as the parameter: `exp_avg` is the momentum of matrices and the running mean of the other
    gradients; `exp_avg_sq`, their running mean square, stays zero for matrices.
    directed: gradients of matrices are already directions (see `directions`), and their momentum is not updated.
    """

    def __init__(self, parameter: nn.Parameter, matrices: Iterable[Matrix], config: Any) -> None:
        """matrices: in the order of the vector. config: the section `optimizer` of the configuration."""
        self._parameter, self._config, self._matrices = parameter, config, list(matrices)
        self.directed = False
        self.param_groups: list[dict[str, Any]] = [{"lr": config.learning_rate}]
        self._rest = between(self._matrices, parameter.numel())
        # torch counts the steps of every tensor; all count alike.
        self._steps = torch.zeros(max(1, len(self._rest)), device=parameter.device)
        self._mean, self._square = torch.zeros_like(parameter.data), torch.zeros_like(parameter.data)
        vectors = {"exp_avg": self._mean, "exp_avg_sq": self._square, "step": self._steps[0]}
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {parameter: vectors}

    @torch.no_grad()
    def step(self) -> None:
        rate, gradient = self.param_groups[0]["lr"], self._parameter.grad
        assert gradient is not None
        self._step_rest(rate, gradient)
        self._step_matrices(rate, gradient)

    def _step_rest(self, rate: float, gradient: Tensor) -> None:
        """Adam."""
        self._steps[1:] = self._steps[0]
        if not self._rest:
            self._steps += 1
            return
        config = self._config
        vectors = (self._parameter.data, gradient, self._mean, self._square)
        parameters, gradients, means, squares = ([vector[part] for part in self._rest] for vector in vectors)
        adam(
            parameters, gradients, means, squares, [], list(self._steps.unbind()), fused=True, amsgrad=False,
            beta1=config.beta1, beta2=config.beta2, lr=rate, weight_decay=0.0, maximize=False,
            eps=1e-8 if config.epsilon is None else config.epsilon,
        )  # fmt: skip

    def _step_matrices(self, rate: float, gradient: Tensor) -> None:
        for alike in by_shape(self._matrices):
            gradients, means = ([matrix.of(vector) for matrix in alike] for vector in (gradient, self._mean))
            found = gradients if self.directed else directions(gradients, means, self._config.momentum)
            parameters = [matrix.of(self._parameter.data) for matrix in alike]
            if self._config.weight_decay:
                torch._foreach_mul_(parameters, 1 - rate * self._config.weight_decay)
            torch._foreach_add_(parameters, found, alpha=-rate * _RMS * math.sqrt(max(alike[0].rows, alike[0].columns)))


def by_shape(matrices: Iterable[Matrix]) -> list[list[Matrix]]:
    """Those with equal numbers of rows and columns together, in a fixed order."""
    found: dict[tuple[int, int], list[Matrix]] = {}
    for matrix in matrices:
        found.setdefault((matrix.rows, matrix.columns), []).append(matrix)
    return [alike for _, alike in sorted(found.items())]


def directions(gradients: list[Tensor], means: list[Tensor], momentum: float) -> list[Tensor]:
    """The orthogonalized momenta of matrices of the same shape (rows, columns), whose running means are updated in place."""
    torch._foreach_lerp_(means, gradients, 1 - momentum)
    ahead = torch.stack(torch._foreach_lerp(gradients, means, momentum))  # as Nesterov
    return list(orthogonalized(ahead).to(ahead).unbind())


def orthogonalized(matrices: Tensor) -> Tensor:
    """The matrices U V^T of the singular value decompositions U S V^T, approximately: singular values are about 0.7 to 1.2.

    matrices: (matrices, rows, columns). Computes in bf16 on a GPU, and returns this type. The steps are matrix products only
    (Newton-Schulz iteration).
    """
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=_TINY)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def muon_cost(elements: int, matrices: Iterable[Matrix]) -> int:
    """The cost of an update, as the number of elements that Adam would update in the same time."""
    sides = [sorted((matrix.rows, matrix.columns)) for matrix in matrices]
    flops = sum(_ITERATIONS * (4 * short * short * long + 2 * short**3) for short, long in sides)
    return elements + round(flops / _FLOPS)


def between(matrices: Sequence[Matrix], elements: int) -> list[slice]:
    """The parts of a vector that belong to no matrix."""
    starts = [0, *(matrix.stop for matrix in matrices)]
    ends = [*(matrix.start for matrix in matrices), elements]
    return [slice(start, end) for start, end in zip(starts, ends, strict=True) if start < end]


def beside(matrices: Iterable[Matrix], place: int) -> int:
    """The place in a vector, nearest to this one, that is inside none of the matrices."""
    for matrix in matrices:
        if matrix.start < place < matrix.stop:
            return matrix.start if place - matrix.start <= matrix.stop - place else matrix.stop
    return place
