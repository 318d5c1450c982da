"""What a worker owes from an earlier start, perhaps in another mode, until an exchange includes it."""

from __future__ import annotations

from torch import Tensor


class Debt:
    """included: it was added to what is exchanged next, or is being exchanged; if that is dropped, it is owed again."""

    def __init__(self, vector: Tensor | None = None) -> None:
        """vector: what is owed (elements,), if anything."""
        self._vector, self._included = vector, False

    @property
    def left(self) -> Tensor | None:
        """What is neither paid nor included."""
        return None if self._included else self._vector

    def include(self, to: Tensor, times: float = 1) -> None:
        """Add what is left to a vector."""
        if (left := self.left) is not None:
            to.add_(left, alpha=times)
            self._included = True

    def settle(self, sent: bool) -> None:
        """What includes the debt, if anything, was sent, or dropped."""
        if self._included and sent:
            self._vector = None
        self._included = False
