"""Dropout with cheap masks on the CPU, where torch's Bernoulli sampling takes a tenth of a training step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_LEVELS = 256


def dropout(x: Tensor, probability: float, training: bool) -> Tensor:
    """Zero elements of `x` with `probability` and scale the others so that the expectation is unchanged.

    On the CPU, each mask element uses one random byte. The probability is therefore rounded to a multiple of 1/256, at least
    1/256 and at most 255/256, and the scale uses the rounded value. Other devices use torch's dropout.
    """
    if not training or probability == 0.0:
        return x
    if x.device.type != "cpu":
        return F.dropout(x, probability)
    return x * _mask(x.shape, probability, x.dtype)


def drop_words(x: Tensor, probability: float, training: bool) -> Tensor:
    """Zero the vectors of whole pieces in `x` (..., dim) with `probability`; the others are not scaled."""
    if not training or probability == 0.0:
        return x
    keep = torch.rand(x.shape[:-1], device=x.device) >= probability
    return x * keep.unsqueeze(-1).to(x.dtype)


def _mask(shape: torch.Size, probability: float, dtype: torch.dtype) -> Tensor:
    """Return a mask of 0 and 1 / (share kept), computed in int8: torch's comparisons to bool are ten times slower."""
    dropped = min(max(1, round(probability * _LEVELS)), _LEVELS - 1)
    elements = shape.numel()
    random = torch.empty((elements + 7) // 8, dtype=torch.int64).random_(torch.iinfo(torch.int64).min, None)
    kept = random.view(torch.int8)[:elements].ge_(dropped - _LEVELS // 2)
    return kept.to(dtype).mul_(_LEVELS / (_LEVELS - dropped)).view(shape)
