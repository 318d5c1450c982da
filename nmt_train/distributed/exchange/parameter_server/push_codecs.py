"""The codecs of a worker's pushes, one per shard, and the residuals that they keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from nmt_train.distributed.codec.codec import Codec
from nmt_train.distributed.codec.error_feedback import ErrorFeedback


class PushCodecs:
    """Maps the rank of a shard to the codec of what is pushed to it.

    shards: the slice of the parameters of each rank. make: a new codec. feedback: codecs keep what they do not send.
    """

    def __init__(
        self, ranks: Iterable[int], shards: Sequence[slice], parameters: Tensor, make: Callable[[], Codec], feedback: bool
    ) -> None:
        self._shards, self._codecs = shards, dict[int, Codec]()
        for rank in ranks:
            codec = make()
            self._codecs[rank] = ErrorFeedback(codec, torch.zeros_like(parameters[shards[rank]])) if feedback else codec
        self.lossy = any(not codec.lossless for codec in self._codecs.values())

    def __getitem__(self, rank: int) -> Codec:
        return self._codecs[rank]

    def residuals(self) -> Iterator[tuple[slice, Tensor]]:
        """The slice of the parameters, and what its codec has not sent, of every codec with error feedback."""
        for rank, codec in self._codecs.items():
            if isinstance(codec, ErrorFeedback):
                yield self._shards[rank], codec.residual

    def add_residuals(self, to: Tensor) -> None:
        """Add all that has not been sent to a vector of the length of the parameters."""
        for place, residual in self.residuals():
            to[place].add_(residual)

    def take_residuals(self, owed: Tensor) -> None:
        """Continue with residuals from a vector of the length of the parameters, and set to zero what was taken."""
        for place, residual in self.residuals():
            residual.copy_(owed[place])
            owed[place] = 0
