"""Dropout with cheap masks on the CPU, where torch's own Bernoulli draws cost a tenth of a training step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_LEVELS = 256


def dropout(x: Tensor, probability: float, training: bool) -> Tensor:
    """Zero elements of `x` with `probability` and scale the others so that the expectation stays.

    On the CPU a mask element comes from one random byte, so the probability is rounded to a multiple of 1/256 (and is at
    least 1/256, at most 255/256); the scale fits the rounded value. Elsewhere this is torch's dropout.
    """
    if not training or probability == 0.0:
        return x
    if x.device.type != "cpu":
        return F.dropout(x, probability)
    return x * _mask(x.shape, probability, x.dtype)


def drop_words(x: Tensor, probability: float, training: bool) -> Tensor:
    """Zero whole vectors of `x` (..., dim) with `probability`, without scaling: a word is there or it is not."""
    if not training or probability == 0.0:
        return x
    keep = torch.rand(x.shape[:-1], device=x.device) >= probability
    return x * keep.unsqueeze(-1).to(x.dtype)


def _mask(shape: torch.Size, probability: float, dtype: torch.dtype) -> Tensor:
    """Elements of 0 or 1 / (share kept). Byte arithmetic stays in int8: torch's comparisons to bool are ten times slower."""
    dropped = min(max(1, round(probability * _LEVELS)), _LEVELS - 1)
    elements = shape.numel()
    random = torch.empty((elements + 7) // 8, dtype=torch.int64).random_(torch.iinfo(torch.int64).min, None)
    kept = random.view(torch.int8)[:elements].ge_(dropped - _LEVELS // 2)
    return kept.to(dtype).mul_(_LEVELS / (_LEVELS - dropped)).view(shape)
