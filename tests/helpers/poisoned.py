"""Losses that are not finite."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import pytest
import torch

from nmt_train.model.transformer import Transformer


class poisoned:  # noqa: N801 - reads as a phrase
    """The losses of these batches, counted from 1, are not finite."""

    def __init__(self, numbers: Container[int], value: float) -> None:
        self.numbers, self.value = numbers, value

    def __enter__(self) -> None:
        self.patch = pytest.MonkeyPatch()
        original, calls = Transformer.loss, iter(range(1, 1000))

        def loss(model: Transformer, batch: Any) -> torch.Tensor:
            value = original(model, batch)
            return value * self.value if next(calls) in self.numbers else value

        self.patch.setattr(Transformer, "loss", loss)

    def __exit__(self, *error: object) -> None:
        self.patch.undo()
