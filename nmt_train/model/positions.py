"""The sinusoids that tell positions apart."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sinusoids(length: int, dim: int, conventions: str) -> Tensor:
    """Return the vectors of `length` positions (length, dim), fp32: section 3.5 of Vaswani et al. (2017).

    conventions: those of Marian and M2M100 have the rates of tensor2tensor, of which the last is 1e-4; in M2M100, whose table
    has a place for padding, positions begin with 2.
    """
    half, first = dim // 2, 2 if conventions == "m2m100" else 0
    steps = half if conventions == "standard" else half - 1  # from the first rate, 1, to 1e-4
    rates = torch.exp(torch.arange(half) * (-math.log(10000.0) / steps))
    angles = torch.arange(first, first + length)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)
