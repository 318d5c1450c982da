"""What cannot be encoded is not sent."""

from __future__ import annotations

import torch
from torch import Tensor

from nmt_train.common.errors import NotFinite


def finite(found: Tensor) -> None:
    """Raise NotFinite if `found`, a vector or what was computed from it, contains infinities or NaN."""
    if not torch.isfinite(found).all():
        raise NotFinite("the vector to be sent is not finite")
