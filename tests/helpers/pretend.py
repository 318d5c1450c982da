"""A GPU for specifications that have none: tensors with values that torch's own rules keep apart from those of the CPU.

They say that they are on `cuda:0`. What a GPU would refuse raises: sums of both devices, numpy's view of a GPU's memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map

GPU = torch.device("cuda", 0)
_BETWEEN = {torch.Tensor.copy_, torch.Tensor.__setitem__, torch.Tensor.to, torch.Tensor.data.__set__, torch.Tensor.grad.__set__}
_NAMED = {torch.Tensor.device.__get__: GPU, torch.Tensor.is_cuda.__get__: True, torch.Tensor.is_cpu.__get__: False}


class Mixed(Exception):
    """Something was computed of both devices."""


class OnGpu(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _NAMED:
            return _NAMED[func]
        if func is torch.Tensor.numpy:
            raise Mixed("numpy of a GPU's memory")
        with torch._C.DisableTorchFunctionSubclass():
            _refuse_both(func, [its for its in tree_iter((args, kwargs)) if isinstance(its, torch.Tensor) and its.dim()])
        if func is torch.Tensor.to:
            return _moved(args, kwargs)
        device = kwargs.pop("device", GPU)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        stays = func is not torch.Tensor.cpu and torch.device(device).type == "cuda"
        kind = OnGpu if stays else torch.Tensor
        return result if func in _BETWEEN else tree_map(lambda its: _as(its, kind), result)


def _refuse_both(func: Any, given: list[torch.Tensor]) -> None:
    here = [isinstance(its, OnGpu) for its in given]
    if func not in _BETWEEN and any(here) and not all(here):
        raise Mixed(f"{func} of both devices")


def _as(its: Any, kind: type[torch.Tensor]) -> Any:
    if not isinstance(its, torch.Tensor) or type(its) is kind or type(its) is torch.nn.Parameter:
        return its
    return its.as_subclass(kind)


def _moved(args: Any, kwargs: dict[str, Any]) -> Any:
    """`tensor.to(...)`: where to is what the other arguments say, if anything."""
    tensor, *rest = args
    named = [kwargs.pop("device", None), *(part for part in rest if isinstance(part, (str, torch.device, torch.Tensor)))]
    target = next((part for part in named if part is not None), None)
    kind: type[torch.Tensor] = type(tensor)
    if target is not None:
        on_gpu = isinstance(target, OnGpu) if isinstance(target, torch.Tensor) else torch.device(target).type == "cuda"
        kind = OnGpu if on_gpu else torch.Tensor
    rest = [target.dtype] if isinstance(target, torch.Tensor) else [part for part in rest if part is not target]
    with torch._C.DisableTorchFunctionSubclass():
        crosses = kind is not type(tensor)
        copy = bool(kwargs.pop("copy", False)) or crosses
        result = torch.Tensor.to(tensor, *rest, copy=copy, **kwargs) if rest or kwargs else tensor.clone() if copy else tensor
        return result.as_subclass(kind)


class _Made(TorchFunctionMode):
    """Tensors that are made on `cuda` are the pretended GPU's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if func is torch.Tensor.to or any(isinstance(its, OnGpu) for its in tree_iter((args, kwargs))):
            return OnGpu.__torch_function__(func, types, args, kwargs)
        if device is not None and torch.device(device).type == "cuda":
            return func(*args, **(kwargs | {"device": "cpu"})).as_subclass(OnGpu)
        return func(*args, **kwargs)


@contextmanager
def gpu() -> Iterator[None]:
    """In the calling thread."""
    with _Made():
        yield


def enter() -> None:
    """Until the calling thread ends."""
    _Made().__enter__()
