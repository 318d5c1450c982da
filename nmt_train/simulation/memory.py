"""How much memory the vectors of a rank take: parameters, gradients, optimizer states, residuals, buffers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from torch import Tensor

from nmt_train.optim.optimizer import Optimizer, state_names

_LEAVES = (type, ModuleType, FunctionType, BuiltinFunctionType, str, int, float)
_SIMULATOR = __name__.rsplit(".", 1)[0]  # objects of the simulator belong to all ranks


def held(root: Any) -> int:
    """Bytes of all tensors that can be reached from `root`, a strategy, and of the optimizer states that will be allocated.

    Local variables of running tasks do not count, nor do activations and messages.
    """
    storages: dict[int, int] = {}
    states = 0
    for value in _reachable(root):
        if isinstance(value, Optimizer):
            states += unallocated(value)
        elif isinstance(value, Tensor):
            for tensor in (value, value.grad):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    storages[storage._cdata] = storage.nbytes()
    return sum(storages.values()) + states


def to_come(root: Any) -> int:
    """Bytes of the optimizer states that will be allocated by all optimizers that can be reached from `root`."""
    return sum(unallocated(value) for value in _reachable(root) if isinstance(value, Optimizer))


def unallocated(optimizer: Optimizer) -> int:
    """Bytes of the states of an optimizer that has not made a step; else 0."""
    if optimizer.state()[0]:
        return 0
    return len(state_names(optimizer.config)) * optimizer.parameters.numel() * optimizer.parameters.element_size()


def _reachable(root: Any) -> Iterator[Any]:
    seen, waiting = {id(root)}, [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, _LEAVES) or type(value).__module__.startswith(_SIMULATOR):
            continue
        yield value
        if isinstance(value, Tensor):
            continue
        for other in gc.get_referents(value):
            if id(other) not in seen:
                seen.add(id(other))
                waiting.append(other)
