"""Low-rank adaptation (LoRA, Hu et al. 2022): fine-tuning trains only two thin factors beside each projection of attention."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SCALE = 2.0  # of the product of the factors: the paper's alpha / rank
_DOWN, _UP = ".down", ".up"


class AdaptedLinear(nn.Linear):
    """A linear layer of `outputs / inputs` projections of one input, each with factors of its own (section 4.1 of the paper).

    down: (projections * rank, inputs). up: (outputs, rank); zero at first, so that the layer begins as it was.
    """

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__(inputs, outputs)
        self._projections = outputs // inputs
        self.down = nn.Parameter(torch.empty(self._projections * rank, inputs))
        self.up = nn.Parameter(torch.empty(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.linear(x, self.down)
        if self._projections == 1:
            change = F.linear(inner, self.up)
        else:
            each = inner.unflatten(-1, (self._projections, -1)), self.up.unflatten(0, (self._projections, -1))
            change = torch.einsum("...pr,pdr->...pd", *each).flatten(-2)
        return super().forward(x) + _SCALE * change


def is_factor(name: str) -> bool:
    """Whether the parameter of this name is a factor of an `AdaptedLinear`."""
    return name.endswith((_DOWN, _UP))


def freeze(model: nn.Module) -> None:
    """From now on, train only the factors; `up` begins as zero."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_factor(name))
        if name.endswith(_UP):
            nn.init.zeros_(parameter)


def merged(factors: Mapping[str, Tensor], frozen: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters, by name, of a model without factors that computes the same.

    Raises KeyError, RuntimeError or ZeroDivisionError if the factors are not those of a model with the parameters `frozen`.
    """
    found = dict(frozen)
    for name, up in factors.items():
        if name.endswith(_UP):
            layer = name.removesuffix(_UP)
            down, weight = factors[layer + _DOWN], f"{layer}.weight"
            projections = len(down) // up.shape[1]
            change = up.unflatten(0, (projections, -1)) @ down.unflatten(0, (projections, -1))
            found[weight] = frozen[weight] + _SCALE * change.flatten(0, 1)
    return found
