"""An optimizer over a flat vector of parameters, with exponential smoothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nmt_train.common.errors import NotFinite, UserError
from nmt_train.optim.config import OptimizerConfig
from nmt_train.optim.learning_rate import learning_rate
from nmt_train.optim.muon import Matrix, between, muon_cost
from nmt_train.optim.torch_optimizers import OPTIMIZERS


class Optimizer:
    """Applies gradients to a flat vector (or a shard of one) in place, by one of `OPTIMIZERS`.

    updates: the number of updates so far. decayed: see `learning_rate`. smoothed: the running mean of the parameters, or None.
    adds_updates: `apply` receives finished updates instead of gradients.
    """

    adds_updates = False

    def __init__(self, config: OptimizerConfig, parameters: Tensor, matrices: Sequence[Matrix] = ()) -> None:
        """matrices: those in the vector that `muon` treats as such."""
        self.config, self.updates, self.decayed = config, 0, 0.0
        self._parameter = torch.nn.Parameter(parameters)
        build = OPTIMIZERS[config.name or "adam"]
        self._torch: Any = _Still() if parameters.is_meta else build(config, self._parameter, matrices)
        self._cost = muon_cost(parameters.numel(), matrices if config.name == "muon" else ())
        self.smoothed = parameters.clone() if config.smoothing else None

    @property
    def learning_rate(self) -> float:
        """The rate of the last update."""
        return learning_rate(self.config, self.updates, self.decayed)

    @property
    def parameters(self) -> Tensor:
        """The vector that is updated in place."""
        return self._parameter.data

    @property
    def cost_elements(self) -> int:
        """The cost of an update, as the number of elements that Adam would update in the same time."""
        return self._cost

    def take_directions(self) -> Tensor | None:
        """From now on, gradients of matrices are directions (see `Muon`).

        Returns the vector with their momenta, which the caller must update; None for parameters without values.
        """
        self._torch.directed, self._cost = True, self._parameter.numel()
        return self._state().get("exp_avg")

    def follow(self, other: Optimizer, updates: int) -> None:
        """Use the learning rate that `other` has after `updates` updates."""
        self.updates, self.decayed = updates, other.decayed

    @torch.no_grad()
    def apply(self, gradient: Tensor, share: float = 1.0) -> None:
        """One update by `gradient`, of the same shape as the parameters; the gradient's values may be overwritten.

        share: the fraction of a full step.
        """
        self.updates += 1
        self._torch.param_groups[0]["lr"] = self._step_size() * share
        self._parameter.grad = gradient
        self._torch.step()
        self.smooth()

    def smooth(self, times: int = 1) -> None:
        """Include the parameters in their running mean, if there is one, once for each of the last `times` updates."""
        if self.smoothed is None or not times:
            return
        # A young mean forgets faster (as in Marian); otherwise it would remember the random initial parameters.
        weights = [
            max(self.config.smoothing, 9 / (update + 10)) for update in range(self.updates - times + 1, self.updates + 1)
        ]
        weight = weights[0] if times == 1 else 1 - math.prod(1 - weight for weight in weights)
        self.smoothed.lerp_(self._parameter, weight)

    def _step_size(self) -> float:
        return self.learning_rate

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """torch's flat vectors by name, and numbers; `load` continues exactly from them. They do not include `smoothed`."""
        vectors = {key: value for key, value in self._state().items() if value.shape == self._parameter.shape}
        numbers = {key: float(value) for key, value in self._state().items() if key not in vectors}
        return vectors, {"updates": self.updates, "decayed": self.decayed, "torch": numbers}

    def everything(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return `state`, with the parameters and their running mean added to its vectors."""
        vectors, numbers = self.state()
        mean = {} if self.smoothed is None else {"smoothed": self.smoothed}
        return {"parameters": self.parameters, **vectors, **mean}, numbers

    def load(self, vectors: Mapping[str, Tensor], numbers: Mapping[str, Any], where: str) -> None:
        """Continue from what `state` returned; UserError if it belongs to another optimizer or size."""
        if numbers["updates"]:
            self._allocate_state()
        elif not vectors:
            return  # nothing else to load; some torch optimizers have vectors before the first update, which are loaded below
        expected = self.state()[0]
        if expected.keys() != vectors.keys():
            names = ", ".join(sorted(vectors)) or "empty"
            raise UserError(
                f"{where}: the optimizer state ({names}) does not fit optimizer.name {self.config.name};"
                " use the optimizer that saved it"
            )
        for name, vector in vectors.items():
            if vector.shape != self._parameter.shape:
                raise UserError(f"{where}: {name} has {vector.numel()} elements instead of {self._parameter.numel()}")
            expected[name].copy_(vector)
        for name, value in numbers["torch"].items():
            self._state()[name].fill_(value)
        self.updates = int(numbers["updates"])
        self.decayed = float(numbers.get("decayed", self.decayed))

    def zero_state(self, updates: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """A `state` whose vectors are all zero and whose number of updates is `updates`."""
        self._allocate_state()
        vectors, numbers = self.state()
        return {name: torch.zeros_like(vector) for name, vector in vectors.items()}, numbers | {"updates": updates}

    def packed(self) -> dict[str, Tensor]:
        """Vectors and numbers of `state` as tensors by name; the caller must keep `updates` itself."""
        vectors, numbers = self.state()
        return vectors | {name: torch.tensor([value]) for name, value in numbers["torch"].items()}

    def unpack(self, packed: Mapping[str, Tensor], where: str) -> None:
        """Continue from what `packed` returned, if it is not empty."""
        vectors = {name: vector for name, vector in packed.items() if vector.shape == self._parameter.shape}
        numbers = {name: float(value) for name, value in packed.items() if name not in vectors}
        if packed:
            self.load(vectors, {"updates": 1, "torch": numbers}, where)

    def _state(self) -> dict[str, Tensor]:
        return {key: value for key, value in self._torch.state.get(self._parameter, {}).items() if isinstance(value, Tensor)}

    def _allocate_state(self) -> None:
        """Make torch allocate its lazily created state, by a step that changes nothing."""
        kept = self._parameter.detach().clone()
        self._torch.param_groups[0]["lr"] = 0.0
        self._parameter.grad = torch.zeros_like(kept)
        self._torch.step()
        self._parameter.data.copy_(kept)


class _Still:
    """Replaces torch's optimizer for parameters that have a size but no values (torch's `meta` device)."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{}]
        self.state: dict[Any, Any] = {}

    def step(self) -> None:
        pass


class Clipping(NamedTuple):
    """The largest norm that a gradient may have (0: any), and the parts of the vector that count and are scaled (none: all)."""

    limit: float
    parts: tuple[slice, ...] = ()

    @classmethod
    def of(cls, config: OptimizerConfig, elements: int, matrices: Sequence[Matrix]) -> Clipping:
        """elements: of the vector. matrices: those in it, in their order."""
        if config.name != "muon":
            return cls(config.clip_norm)
        parts = tuple(between(matrices, elements))
        return cls(config.clip_norm if parts else 0.0, parts)


def divide_and_clip(gradient: Tensor, clipping: Clipping, divisor: float) -> float:
    """Divide a gradient by `divisor`, then clip its norm, both in place.

    Returns the norm after dividing and before clipping. Raises NotFinite if the gradient has elements that are infinite or not
    numbers, and then leaves it unchanged. The norm of a gradient without values is 0.
    """
    if gradient.is_meta:
        return 0.0
    norm = float(torch.linalg.vector_norm(gradient)) / divisor
    if not math.isfinite(norm):
        raise NotFinite(f"gradient norm is {norm}")
    clipped = [gradient[part] for part in clipping.parts]
    if clipped:
        norm = float(torch.stack(torch._foreach_norm(clipped)).norm()) / divisor
    factor = clipping.limit / norm if 0 < clipping.limit < norm else 1.0
    if clipped and factor != 1.0:
        torch._foreach_mul_(clipped, factor)
        factor = 1.0
    if factor / divisor != 1.0:
        gradient.mul_(factor / divisor)
    return norm


def state_names(config: OptimizerConfig) -> set[str]:
    """The names of an optimizer's vectors, each of the size of the parameters: those of an optimizer of two parameters."""
    return set(Optimizer(config, torch.zeros(2)).zero_state(1)[0])
