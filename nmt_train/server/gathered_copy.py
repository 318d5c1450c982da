"""A copy of all parameters, gathered from the shards while training continues."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nmt_train.transport import Future


class GatheredCopy:
    """A future of a vector (elements,) whose slices are still being received."""

    def __init__(self, elements: int, parts: list[tuple[slice, Future[Any]]]) -> None:
        self._elements, self._parts = elements, parts

    def done(self) -> bool:
        return all(part.done() for _, part in self._parts)

    def result(self) -> Tensor:
        vector = torch.empty(self._elements)
        for place, part in self._parts:
            vector[place] = part.result()[1].vector(place.stop - place.start)
        return vector
