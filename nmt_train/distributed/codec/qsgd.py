"""Unbiased random rounding to a few levels (QSGD, Alistarh et al. 2017)."""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch import Tensor

from nmt_train.distributed.codec import integer_coding as bits
from nmt_train.distributed.codec.codec import Codec
from nmt_train.distributed.codec.config import CodecConfigs, QsgdConfig
from nmt_train.distributed.codec.finite import finite
from nmt_train.distributed.message import Message


class Qsgd(Codec):
    """Sends the norm of each bucket of `bucket` elements, and the sign of each element and a level from 0 to `levels`. An
    element is rounded at random to the level below or above it, so that the expected value is the element.

    With b elements in a bucket and s levels, the squared error is at most min(b / s^2, sqrt(b) / s) times the squared norm
    (Lemma 3.1). For normally distributed elements, it is 0.1 times with the default settings, but 1.6 times with 512 and 7.
    """

    biased = False

    def __init__(self, config: QsgdConfig) -> None:
        self._config, self._width = config, config.levels.bit_length()

    @classmethod
    def build(cls, configs: CodecConfigs, dropped: float) -> Qsgd:
        return cls(configs.qsgd)

    def encode(self, vector: Tensor, update: int) -> Message:
        bucket, levels = self._config.bucket, self._config.levels
        filled = torch.nn.functional.pad(vector.cpu(), (0, -vector.numel() % bucket)).view(-1, bucket)
        norms = filled.norm(dim=1, keepdim=True)
        finite(norms)
        exact = filled.abs().div_(norms.clamp(min=torch.finfo(norms.dtype).tiny)).mul_(levels)
        # Not the global generator, from which another thread may draw; every rank and every update has norms of its own.
        generator = torch.Generator().manual_seed(zlib.crc32(norms.numpy().tobytes(), update))
        chosen = (exact + torch.rand(exact.shape, generator=generator)).floor_().clamp_(max=levels)
        whole = chosen.flatten()[: vector.numel()].to(torch.int64).numpy()
        signs = np.packbits((vector.cpu() < 0).numpy())
        code = bits.gamma(whole + 1) if self._config.coding == "elias" else bits.fixed(whole, self._width)
        return Message((), (norms.flatten(), torch.from_numpy(signs), torch.from_numpy(code)))

    def encode_shape(self, vector: Tensor) -> Message:
        """Assumes the plain code even if coding is elias, because the length of an Elias gamma code depends on the values."""
        elements = vector.numel()
        codes = [vector.new_empty(-(-elements // 8) * planes, dtype=torch.uint8) for planes in (1, self._width)]
        return Message((), (vector.new_empty(-(-elements // self._config.bucket)), *codes))

    def decode(self, message: Message, into: Tensor) -> None:
        count, bucket = into.numel(), self._config.bucket
        expected = (torch.float32, -(-count // bucket)), (torch.uint8, -(-count // 8)), (torch.uint8, None)
        norms, signs, code = (tensor.cpu() for tensor in message.vectors(*expected))
        with message.understood():
            if self._config.coding == "elias":
                whole = bits.from_gamma(code.numpy(), count) - 1
            else:
                whole = bits.from_fixed(code.numpy(), count, self._width)
            if count and not 0 <= whole.min() <= whole.max() <= self._config.levels:
                raise ValueError(f"a level that is not from 0 to {self._config.levels}")
        each = norms.repeat_interleave(bucket)[:count] / self._config.levels
        negative = torch.from_numpy(np.unpackbits(signs.numpy(), count=count)).to(torch.float32)
        into.copy_(torch.from_numpy(whole).to(torch.float32) * each * (1 - 2 * negative))
