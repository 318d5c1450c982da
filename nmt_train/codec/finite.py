"""What cannot be encoded is not sent."""

from __future__ import annotations

import torch
from torch import Tensor

from nmt_train.common.errors import NotFinite


def finite(found: Tensor) -> None:
    """Raise NotFinite if `found`, a vector or what was computed from it, contains infinities or NaN."""
    if not torch.isfinite(found).all():
        raise NotFinite("the vector to be sent is not finite")


def largest_magnitude(vector: Tensor) -> Tensor:
    """The largest magnitude of `vector` (elements,), a scalar tensor; NotFinite if it is not finite."""
    low, high = vector.aminmax() if vector.numel() else (vector.new_zeros(()),) * 2
    largest = torch.maximum(-low, high)
    finite(largest)
    return largest
