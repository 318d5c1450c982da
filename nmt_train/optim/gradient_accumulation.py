"""How gradients of several batches become one: the same rule wherever that happens.

The joined gradient is the mean per target token of all batches, so that a batch gives the same as its parts, however they are
spread over steps, devices or machines. Or (batch.reduction: sum) it is the sum of the batches' means, as in the thesis (3.4);
that is clipped as the mean is. Updates that workers have made themselves are no gradients: a mean of them counts workers.
"""

from __future__ import annotations

from torch import Tensor

from nmt_train.optim.optimizer import clip


class GradientAccumulator:
    """Gradients of a worker's steps, which pile up in its flat gradient until they are given away.

    weight: of what has piled up: target tokens, or, where sums are wanted, batches.
    """

    def __init__(self, sums: bool) -> None:
        self._sums, self.weight, self._first, self._factor = sums, 0, 0, 1.0

    def add(self, tokens: int) -> float:
        """A batch of so many target tokens follows: the factor for its loss, which is a mean per token.

        The first has 1, whatever its size, so that a batch that is alone stays as it is to the bit.
        """
        weight = 1 if self._sums else tokens
        self._first = self._first or weight
        self.weight += weight
        self._factor = weight / self._first
        return self._factor

    @property
    def factor(self) -> float:
        """The last batch's."""
        return self._factor

    @property
    def divisor(self) -> float:
        """What makes the flat gradient the mean of all that has piled up."""
        return self.weight / self._first if self.weight else 1.0

    def take(self) -> tuple[float, int]:
        """Divisor and weight; the pile is then empty."""
        taken = self.divisor, self.weight
        self.weight = self._first = 0
        return taken

    def join(self, gradient: Tensor, clip_norm: float) -> tuple[float, int]:
        """Make the flat gradient one, in place: clipped to clip_norm (0: not); its norm before, and its weight.

        NotFinite if the norm is infinite or not a number; the pile is then empty as well.
        """
        divisor, weight = self.take()
        norm = clip(gradient, clip_norm, divisor)
        if self._sums and weight > 1:
            gradient.mul_(weight)
        return norm, weight
