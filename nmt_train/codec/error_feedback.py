"""Error feedback for any codec: keeps the part that a message leaves out and adds it to the next vector (Seide et al. 2014)."""

from __future__ import annotations

import torch
from torch import Tensor

from nmt_train.codec.codec import Codec
from nmt_train.common.message import Message
from nmt_train.optim.flat_model import add


class ErrorFeedback(Codec):
    """`residual` (elements,) is what has not been sent yet: decay * old residual + vector == decoded message + new residual.

    `encode` replaces the tensor `residual`, so do not keep a reference to it.
    """

    def __init__(self, codec: Codec, residual: Tensor, decay: float = 1.0) -> None:
        self._codec, self.residual, self._decay = codec, residual, decay
        self._sum = torch.empty_like(residual)

    def encode(self, vector: Tensor, update: int) -> Message:
        """The message for `vector` plus decay * residual. If it raises NotFinite, the residual is unchanged."""
        add(vector, self.residual, out=self._sum, scale=self._decay)
        message = self._codec.encode_away(self._sum, update)
        self.residual, self._sum = self._sum, self.residual
        return message

    def undo(self) -> None:
        """Take back the last `encode`, whose message no rank will apply: the residual is again what it was before."""
        self.residual, self._sum = self._sum, self.residual

    def encode_shape(self, vector: Tensor) -> Message:
        return self._codec.encode_shape(vector)

    def decode(self, message: Message, into: Tensor) -> None:
        self._codec.decode(message, into)

    def add(self, message: Message, into: Tensor, scale: float = 1.0) -> None:
        self._codec.add(message, into, scale)
