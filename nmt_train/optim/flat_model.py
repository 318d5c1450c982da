"""A model whose parameters and gradients are views of two flat vectors, so that an exchange needs only slices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nmt_train.optim.frozen import Frozen, by_name, fill, layout_of
from nmt_train.optim.muon import Matrix, beside


class FlatModel:
    """`parameters` and `gradient`, both (elements,) fp32 on the model's device; the model reads and writes them in place.

    `layout` lists (name, shape) in the order of the vector. Parameters that the model does not train are in `frozen` instead.
    With `precision` bf16, the layers of the model read a copy of their parameters in bf16 instead, which `loss` and `using`
    make by one operation, and `backward` adds their gradients to `gradient` by a few: torch's autocast would convert every
    matrix and every gradient by itself.
    """

    def __init__(self, model: nn.Module, precision: str = "fp32") -> None:
        self.model: Any = model
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._parameters = [parameter for _, parameter in named]
        self.layout, self.frozen = layout_of(named), Frozen(model)
        self.parameters = torch.cat([parameter.detach().flatten() for _, parameter in named])
        self.gradient = torch.zeros_like(self.parameters)
        for (_, parameter), value, gradient in zip(
            named, self.named(self.parameters).values(), self.named(self.gradient).values(), strict=True
        ):
            parameter.data = value
            parameter.grad = gradient
        self._layers = list[nn.Parameter]()  # those with a copy, the last ones of the vector
        self._of_layers = slice(self.parameters.numel(), self.parameters.numel())
        if precision == "bf16":
            self._copy_layers()

    def matrices(self) -> list[Matrix]:
        """The matrices of the model's layers, by their places in the vectors; none if the model does not name them."""
        joined = self.model.layer_matrices() if hasattr(self.model, "layer_matrices") else {}
        found, start = [], 0
        for name, shape in self.layout:
            for part in range(joined.get(name, 0)):
                rows = shape[0] // joined[name]
                found.append(Matrix(start + part * rows * shape[1], rows, shape[1]))
            start += torch.Size(shape).numel()
        return found

    def _copy_layers(self) -> None:
        layers = self.model.compute_layers_in(torch.bfloat16)
        self.frozen.convert(layers, torch.bfloat16)
        self._layers = [parameter for parameter in layers if parameter.requires_grad]
        first = len(self._parameters) - len(self._layers)
        assert all(one is other for one, other in zip(self._layers, self._parameters[first:], strict=True))
        sizes = [parameter.numel() for parameter in self._layers]
        self._of_layers = slice(self.parameters.numel() - sum(sizes), self.parameters.numel())
        self._copy = self.parameters[self._of_layers].bfloat16()
        for parameter, values in zip(self._layers, self._copy.split(sizes), strict=True):
            parameter.grad = None
            parameter.data = values.view(parameter.shape)

    def _refresh(self) -> None:
        if self._layers:
            self._copy.copy_(self.parameters[self._of_layers])

    def loss(self, batch: Any) -> Tensor:
        """The model's loss of a batch, with the present values of `parameters`."""
        self._refresh()
        loss: Tensor = self.model.loss(batch)
        return loss

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss` to `gradient`."""
        try:
            loss.backward()
            gradients = [parameter.grad.flatten() for parameter in self._layers if parameter.grad is not None]
            if gradients:  # else `watch` has added them already
                self.gradient[self._of_layers] += torch.cat(gradients)
        finally:  # also if memory was not enough
            for parameter in self._layers:
                parameter.grad = None

    def watch(self, computed: Callable[[slice], None]) -> None:
        """In every backward pass from now on, call `computed` with each parameter's slice when its gradient is complete."""
        start = 0
        for parameter in self._parameters:
            place = slice(start, start := start + parameter.numel())
            parameter.register_post_accumulate_grad_hook(partial(self._complete, place, computed))

    def _complete(self, place: slice, computed: Callable[[slice], None], parameter: Tensor) -> None:
        if place.start >= self._of_layers.start:
            assert parameter.grad is not None
            self.gradient[place] += parameter.grad.flatten()
            parameter.grad = None
        computed(place)

    def separate_lookups(self) -> Tensor:
        """Separate the two parts of the gradient of the first parameter, an embedding that is also the output layer.

        From now on, the model adds the gradients of lookups to the vector (elements of the embedding,) that is returned;
        `gradient` has only the output layer's. Empty if the model has no method `separate_lookups`.
        """
        separate = getattr(self.model, "separate_lookups", None)
        if separate is None:
            return self.gradient.new_zeros(0)
        gradient = torch.zeros_like(self._parameters[0].data)
        separate(gradient)
        return gradient.view(-1)

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """The views of a flat `vector` by parameter name, in the parameters' shapes."""
        return by_name(self.layout, vector)

    @contextmanager
    def using(self, vector: Tensor) -> Iterator[None]:
        """In this context, the model has the values of `vector`; afterward it has its own values again, bit for bit."""
        if vector.data_ptr() == self.parameters.data_ptr():
            self._refresh()
            yield
            return
        own = self.parameters.clone()
        self.parameters.copy_(vector)
        self._refresh()
        try:
            yield
        finally:
            self.parameters.copy_(own)

    def load(self, tensors: Mapping[str, Tensor], into: Tensor, where: str) -> None:
        """Copy named tensors into a flat vector; raises UserError if names or shapes differ from those of this model."""
        fill(self.named(into), tensors, where)


def cpu_copy(vector: Tensor) -> Tensor:
    """A copy on the CPU, for vectors that leave a rank or outlive its worker. A vector without values (torch's meta device) is
    copied on its own device.
    """
    return vector.clone() if vector.is_meta else vector.to("cpu", copy=True)


def add(left: Tensor, right: Tensor, out: Tensor, scale: float = 1.0) -> Tensor:
    """`left` + `scale` * `right` in `out`. Does nothing for vectors without values (torch's meta device), to save time."""
    return out if out.is_meta else torch.add(left, right, alpha=scale, out=out)


def subtract(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """`left` - `right` in `out`. Does nothing for vectors without values (see `add`)."""
    return out if out.is_meta else torch.sub(left, right, out=out)


def partition(elements: int, nodes: Sequence[int], most: int | None = None, whole: Sequence[Matrix] = ()) -> list[slice]:
    """The shard of each rank: divide `elements` evenly over the nodes, then each node's part over its ranks (thesis 3.6).

    nodes: the node of each rank. most: how many ranks hold a shard, chosen one per node first (None: all); the other shards are
    empty. whole: matrices that must not be divided.

    The parts of nodes, and the parts within a node, differ by at most one element, except because of `whole`. The part of a
    node is contiguous.
    """
    before: Counter[int] = Counter()
    turns = []
    for rank, node in enumerate(nodes):
        turns.append((before[node], node, rank))
        before[node] += 1
    holders = sorted(rank for _, _, rank in sorted(turns)[:most])
    order = sorted({nodes[rank] for rank in holders})
    shards = [slice(0, 0)] * len(nodes)
    for place, node in enumerate(order):
        start, end = elements * place // len(order), elements * (place + 1) // len(order)
        ranks = [rank for rank in holders if nodes[rank] == node]
        for number, rank in enumerate(ranks):
            first, last = (start + (end - start) * part // len(ranks) for part in (number, number + 1))
            shards[rank] = slice(beside(whole, first), beside(whole, last))
    return shards
