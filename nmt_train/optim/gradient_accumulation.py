"""How the gradients of several batches become one: the same rule for steps, devices and machines.

The joined gradient is the mean per target token over all batches. A batch therefore gives the same gradient as its parts,
however these are spread over steps, devices or machines. With batch.reduction: sum, the joined gradient is the sum of the means
of the batches, as in the thesis (3.4), and is clipped by the same factor as the mean. Finished updates are not gradients: in
their mean, every worker counts equally.
"""

from __future__ import annotations

from torch import Tensor

from nmt_train.optim.optimizer import Clipping, divide_and_clip


class GradientAccumulator:
    """Tracks the gradients of a worker's steps, which accumulate in its flat gradient until they are exchanged.

    weight: the weight of the accumulated gradients: their target tokens, or their batches if gradients are summed.
    """

    def __init__(self, sums: bool) -> None:
        self._sums, self.weight, self._first, self._factor = sums, 0, 0, 1.0

    def add(self, tokens: int) -> float:
        """Add a batch with `tokens` target tokens; returns the factor for its loss, which is a mean per token.

        The first batch has factor 1, whatever its size, so that a single batch stays bit-identical.
        """
        weight = 1 if self._sums else tokens
        self._first = self._first or weight
        self.weight += weight
        self._factor = weight / self._first
        return self._factor

    @property
    def factor(self) -> float:
        """The loss factor of the last batch."""
        return self._factor

    @property
    def divisor(self) -> float:
        """Dividing the flat gradient by this gives the mean of the accumulated gradients."""
        return self.weight / self._first if self.weight else 1.0

    def take(self) -> tuple[float, int]:
        """Return divisor and weight, and begin a new accumulation."""
        taken = self.divisor, self.weight
        self.weight = self._first = 0
        return taken

    def join(self, gradient: Tensor, clipping: Clipping) -> tuple[float, int]:
        """Turn the flat gradient into the joined gradient in place, clipped.

        Returns the norm before clipping, and the weight. Raises NotFinite if the norm is infinite or not a number; a new
        accumulation begins in this case too.
        """
        divisor, weight = self.take()
        norm = divide_and_clip(gradient, clipping, divisor)
        if self._sums and weight > 1:
            gradient.mul_(weight)
        return norm, weight
