"""How much memory the vectors of a rank take: parameters, gradients, optimizer states, residuals, buffers."""

from __future__ import annotations

import gc
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from torch import Tensor

from nmt_train.optim.optimizer import Optimizer, state_names

_LEAVES = (type, ModuleType, FunctionType, BuiltinFunctionType, str, int, float)
_SIMULATOR = __name__.rsplit(".", 1)[0]  # objects of the simulator belong to all ranks


def held(root: Any) -> int:
    """Bytes of all tensors that can be reached from `root`, a schedule, and of the optimizer states that will be allocated.

    Local variables of running tasks do not count, nor do activations and messages.
    """
    seen, waiting = {id(root)}, [root]
    storages: dict[int, int] = {}
    states = 0
    while waiting:
        found = waiting.pop()
        if isinstance(found, Tensor):
            for tensor in (found, found.grad):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    storages[storage._cdata] = storage.nbytes()
            continue
        if isinstance(found, _LEAVES) or type(found).__module__.startswith(_SIMULATOR):
            continue
        if isinstance(found, Optimizer) and not found.state()[0]:
            states += len(state_names(found.config)) * found.parameters.numel() * found.parameters.element_size()
        for other in gc.get_referents(found):
            if id(other) not in seen:
                seen.add(id(other))
                waiting.append(other)
    return sum(storages.values()) + states
