"""The parameters that a model does not train, in one vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from nmt_train.common.errors import UserError

Layout = list[tuple[str, tuple[int, ...]]]  # the names and shapes of the parameters in a flat vector, in their order


class Frozen:
    """`vector` (elements,), fp32 on the model's device, has the values of all parameters without `requires_grad`; most models
    have none. After a change of `vector`, call `use`.
    """

    def __init__(self, model: nn.Module) -> None:
        named = [(name, parameter) for name, parameter in model.named_parameters() if not parameter.requires_grad]
        self._parameters, self.layout = [parameter for _, parameter in named], layout_of(named)
        nothing = torch.empty(0)
        self.vector = torch.cat([parameter.detach().flatten() for _, parameter in named] or [nothing])
        self._types = [torch.float32] * len(named)
        self.use()

    def __bool__(self) -> bool:
        return bool(self.layout)

    def convert(self, layers: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        """From now on, let these parameters of the model be copies in another type."""
        theirs = {id(parameter) for parameter in layers}
        self._types = [dtype if id(parameter) in theirs else torch.float32 for parameter in self._parameters]
        self.use()

    def use(self) -> None:
        """Let the model have the values of `vector`."""
        for parameter, value, dtype in zip(self._parameters, self.named().values(), self._types, strict=True):
            parameter.data = value.to(dtype)  # fp32: the same memory

    def named(self) -> dict[str, Tensor]:
        """The views of `vector` by parameter name, in the parameters' shapes."""
        return by_name(self.layout, self.vector)

    def load(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Take the values of these tensors; raises UserError as `fill`."""
        fill(self.named(), tensors, where)
        self.use()


def layout_of(named: Sequence[tuple[str, nn.Parameter]]) -> Layout:
    return [(name, tuple(parameter.shape)) for name, parameter in named]


def by_name(layout: Layout, vector: Tensor) -> dict[str, Tensor]:
    """The views of a flat `vector` by parameter name, in the parameters' shapes."""
    sizes = [torch.Size(shape).numel() for _, shape in layout]
    return {name: part.view(shape) for (name, shape), part in zip(layout, vector.split(sizes), strict=True)} if layout else {}


def fill(views: Mapping[str, Tensor], tensors: Mapping[str, Tensor], where: str) -> None:
    """Copy named tensors into the views of a vector; raises UserError if names or shapes differ from those of this model."""
    for name in sorted(views.keys() ^ tensors.keys()):
        raise UserError(f"{where}: parameter {name} is in only one of checkpoint and model; use a checkpoint of this model")
    for name, view in views.items():
        if tensors[name].shape != view.shape:
            shapes = f"{tuple(tensors[name].shape)} there, {tuple(view.shape)} in this model"
            raise UserError(f"{where}: parameter {name} has another shape: {shapes}; use the checkpoint's config")
        view.copy_(tensors[name])
