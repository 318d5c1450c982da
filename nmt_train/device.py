"""The device that a rank drives, and what makes it fast: threads, the allocator, reduced precision."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import shutil
import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from nmt_train.common.errors import UserError

_SEVERAL = re.compile(r"(cpu|cuda)(?:\s*x\s*([1-9]\d{0,2}))?")
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def known(devices: str | list[int]) -> str | list[int]:
    """`devices:` as it is, a GPU's number as a list; UserError for none of its forms. No device is looked at."""
    if isinstance(devices, str) and devices.isdigit():
        devices = [int(devices)]
    if not devices:
        raise UserError("devices: the list names no GPU; write auto, cpu, cuda, all or numbers like [0]")
    if isinstance(devices, str) and devices not in ("auto", "all") and not _SEVERAL.fullmatch(devices):
        raise UserError(
            f"devices: {devices!r} is unknown; write auto, cpu, cpu x N, cuda, cuda x N, all or a list of GPU numbers like [0]"
        )
    return devices


def choose(devices: str | list[int]) -> list[torch.device]:
    """The devices named by `devices:` (`auto`, `cpu`, `cpu x N`, `cuda`, `cuda x N`, `all`, or GPU numbers).

    UserError where CUDA is asked for and absent, or a number names no GPU.
    """
    devices = known(devices)
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices == "auto":
        devices = "cuda" if available else "cpu"
    several = _SEVERAL.fullmatch(devices) if isinstance(devices, str) else None
    if several and several[1] == "cpu":
        return [torch.device("cpu")] * int(several[2] or 1)
    if not available:
        raise UserError(
            f"devices: {devices} asks for a GPU, but this machine offers none to torch (host {socket.gethostname()}); use"
            " devices: cpu"
        )
    if several:
        return [torch.device("cuda", 0)] * int(several[2] or 1)
    numbers = range(available) if devices == "all" else devices
    for number in numbers:
        if not isinstance(number, int) or not 0 <= number < available:
            raise UserError(f"devices: GPU {number} does not exist here; there are {available}, numbered from 0")
    if len(set(numbers)) != len(numbers):
        raise UserError(f"devices: {devices} must name each GPU once")
    return [torch.device("cuda", int(number)) for number in numbers]


def permitted(devices: str | list[int]) -> int:
    """How many ranks `devices:` lets share a GPU."""
    several = _SEVERAL.fullmatch(devices) if isinstance(devices, str) else None
    return int(several[2] or 1) if several and several[1] == "cuda" else 1


def identity(own: torch.device) -> str:
    """What tells a GPU from all others of its machine, whatever numbers ranks give them; empty for a CPU."""
    if own.type == "cpu":
        return ""
    unique = getattr(torch.cuda.get_device_properties(own), "uuid", None)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return f"GPU {unique or (visible[own.index] if visible[0] else own.index)}"


def prepare(devices: str | list[int], threads: int, nodes: tuple[int, ...] = (0,), rank: int = 0) -> torch.device:
    """The device of `rank`, with its number of compute threads set (0: torch's choice, the cores shared by a node's ranks).

    nodes: the node of each rank. Where a node has more ranks than this one sees GPUs, they take turns: each may see another,
    and whether two have the same one is found when they compare (start.py). Freed memory stays in the process: a training
    step frees and takes the same large blocks again and again; glibc would hand each back to the kernel, which must then clear
    its pages anew. Keeping them made a step about a tenth faster.
    """
    beside = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    found = choose(devices if devices not in ("auto", "cuda") or len(beside) == 1 else _all_of(devices))
    own = found[beside.index(rank) % len(found)]
    if own.type == "cuda":
        torch.cuda.set_device(own)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if threads or (len(beside) > 1 and "OMP_NUM_THREADS" not in os.environ):
        # A launcher that binds ranks to cores has divided them already.
        torch.set_num_threads(threads or max(1, cores // (len(beside) if cores == os.cpu_count() else 1)))
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return own  # another C library: only speed is lost
    mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_M_TOP_PAD, 1 << 28)
    return own


def _all_of(devices: str | list[int]) -> str:
    """What `auto` and `cuda` mean to several ranks of a machine: all its GPUs."""
    return "all" if devices == "cuda" or torch.cuda.is_available() else "cpu"


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """The context for forward passes: nothing for `fp32`, torch's bfloat16 autocast for `bf16`."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def compiled(function: Callable[..., Tensor], own: torch.device) -> Callable[..., Tensor]:
    """torch.compile's version of a function, for any shapes; UserError without the compiler of C that it needs."""
    names = ("gcc", "clang", "cc") if own.type == "cuda" else ("g++", "clang++", "c++")
    given = os.environ.get("CC" if own.type == "cuda" else "CXX")
    if not any(map(shutil.which, (given,) if given else names)):
        raise UserError(
            f"compile: torch needs a compiler for it, and host {socket.gethostname()} has none ({given or ', '.join(names)});"
            " install one, or use compile: false"
        )
    made: Callable[..., Tensor] = torch.compile(function, dynamic=True)
    return made


def inherit() -> Callable[[], None]:
    """What a thread that the calling one starts must do first: torch's present GPU is each thread's own, at first GPU 0."""
    return partial(torch.cuda.set_device, torch.cuda.current_device()) if torch.cuda.is_initialized() else _nothing


def settle(own: torch.device) -> Callable[[], None] | None:
    """What waits for a device's queued work, if it has a queue."""
    return partial(torch.cuda.synchronize, own) if own.type == "cuda" else None


def random(own: torch.device) -> dict[str, Tensor]:
    """States, on the CPU, of torch's generators that are drawn from where a rank computes on this device."""
    states = {"cpu": torch.get_rng_state()}
    if own.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(own)
    return states


def set_random(own: torch.device, states: Mapping[str, Tensor]) -> None:
    """Go on from what `random` gave, on this device or another, as far as it says."""
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if own.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], own)


def release() -> None:
    """Free what only refers to itself, and give back what torch keeps of a GPU's memory."""
    gc.collect()
    torch.cuda.empty_cache()


def _nothing() -> None:
    pass
