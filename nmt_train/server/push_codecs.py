"""The codecs of a worker's pushes, one per shard, and what the worker has not sent yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from nmt_train.codec.codec import Codec
from nmt_train.codec.error_feedback import ErrorFeedback
from nmt_train.codec.finite import finite
from nmt_train.common.errors import NotFinite
from nmt_train.strategy.debt import Debt
from nmt_train.strategy.state import WorkerState


class PushCodecs:
    """Maps the rank of a shard to the codec of what is pushed to it.

    debt: what a loaded state had not sent, and no codec keeps; the next push includes it. gradient_debt: the residual of
    gradients of a loaded state, if updates are pushed; the gradient of the next one includes it.
    """

    def __init__(
        self, ranks: Iterable[int], shards: Sequence[slice], parameters: Tensor, updates: bool, make: Callable[[int], Codec]
    ) -> None:
        """shards: the slice of the parameters of each rank. updates: finished ones are pushed, not gradients.

        make: a new codec for the shard of a rank; all but lossless ones keep what they do not send.
        """
        self._shards, self._codecs, self._like, self._updates = shards, dict[int, Codec](), parameters, updates
        for rank in ranks:
            codec = make(rank)
            self._codecs[rank] = codec if codec.lossless else ErrorFeedback(codec, torch.zeros_like(parameters[shards[rank]]))
        self.lossy = any(not codec.lossless for codec in self._codecs.values())
        self.debt, self.gradient_debt = Debt(), Debt()

    def __getitem__(self, rank: int) -> Codec:
        return self._codecs[rank]

    def _residuals(self) -> Iterator[tuple[slice, Tensor]]:
        """The slice of the parameters, and what its codec has not sent, of every codec with error feedback."""
        for rank, codec in self._codecs.items():
            if isinstance(codec, ErrorFeedback):
                yield self._shards[rank], codec.residual

    def add_residuals(self, to: Tensor) -> None:
        """Add what codecs have not sent to a vector of the length of the parameters."""
        for place, residual in self._residuals():
            to[place].add_(residual)

    def check(self, payload: Tensor) -> None:
        """Raise NotFinite if the payload is not finite, and is thus dropped."""
        if not payload.is_meta:
            try:
                finite(torch.linalg.vector_norm(payload))
            except NotFinite:
                self.settle(sent=False)
                raise

    def settle(self, sent: bool) -> None:
        """A payload is sent, or dropped, with what it includes of debts."""
        self.debt.settle(sent)
        self.gradient_debt.settle(sent)

    def state(self) -> WorkerState:
        """All that has not been sent: of gradients, or of updates by which gradients were replaced."""
        unsent, gradients = self._unsent(), self.gradient_debt.left
        return WorkerState(residual=gradients, unsent=unsent) if self._updates else WorkerState(residual=unsent)

    def _unsent(self) -> Tensor | None:
        if not any(self._residuals()):
            return None if self.debt.left is None else self.debt.left.clone()
        unsent = torch.zeros_like(self._like) if self.debt.left is None else self.debt.left.clone()
        self.add_residuals(unsent)
        return unsent

    def load(self, state: WorkerState) -> None:
        """Continue with what `state` returned."""
        unsent, gradients = (state.unsent, state.residual) if self._updates else (state.residual, None)
        self.debt, self.gradient_debt = Debt(), Debt(None if gradients is None else gradients.to(self._like))
        if unsent is None:
            return
        owed = unsent.to(self._like, copy=True)
        for place, residual in self._residuals():
            residual.copy_(owed[place])
            owed[place] = 0
        self.debt = Debt(owed if owed.any() else None)
