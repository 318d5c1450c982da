"""The codecs of a worker's pushes, one per shard, and what they have not sent yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from nmt_train.codec.codec import Codec
from nmt_train.codec.error_feedback import ErrorFeedback


class PushCodecs:
    """Maps the rank of a shard to the codec of what is pushed to it.

    shards: the slice of the parameters of each rank. make: a new codec for the shard of a rank; all but lossless ones keep what
    they do not send.
    """

    def __init__(self, ranks: Iterable[int], shards: Sequence[slice], parameters: Tensor, make: Callable[[int], Codec]) -> None:
        self._shards, self._codecs, self._like = shards, dict[int, Codec](), parameters
        for rank in ranks:
            codec = make(rank)
            self._codecs[rank] = codec if codec.lossless else ErrorFeedback(codec, torch.zeros_like(parameters[shards[rank]]))
        self.lossy = any(not codec.lossless for codec in self._codecs.values())
        self._debt: Tensor | None = None  # the part of a loaded vector that no codec keeps; the next push includes it

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

    def add_debt(self, to: Tensor, times: float = 1) -> None:
        """Add what is owed from before to a vector that is pushed now."""
        if self._debt is not None:
            to.add_(self._debt, alpha=times)
            self._debt = None

    def unsent(self) -> Tensor | None:
        """All that has not been sent (elements of the parameters,); None if that is nothing."""
        if not any(self._residuals()):
            return None if self._debt is None else self._debt.clone()
        unsent = torch.zeros_like(self._like) if self._debt is None else self._debt.clone()
        self.add_residuals(unsent)
        return unsent

    def load(self, unsent: Tensor | None) -> None:
        """Continue with what `unsent` returned."""
        if unsent is None:
            self._debt = None
            return
        owed = unsent.to(self._like, copy=True)
        for place, residual in self._residuals():
            residual.copy_(owed[place])
            owed[place] = 0
        self._debt = owed if owed.any() else None
