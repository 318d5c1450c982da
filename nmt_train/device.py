"""The device that a rank drives, and what makes it fast: threads, the allocator, reduced precision."""

from __future__ import annotations

import ctypes
import os
import re
import socket
from contextlib import AbstractContextManager, nullcontext

import torch

from nmt_train.errors import UserError

_SEVERAL = re.compile(r"cpu(?:\s*x\s*([1-9]\d{0,2}))?")
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def choose(devices: str | list[int]) -> list[torch.device]:
    """The devices named by `devices:` (`auto`, `cpu`, `cpu x N`, `cuda`, `all`, or GPU numbers).

    UserError where CUDA is asked for and absent, or a number names no GPU.
    """
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices == "auto":
        return [torch.device("cuda", 0)] if available else [torch.device("cpu")]
    if isinstance(devices, str) and (several := _SEVERAL.fullmatch(devices)):
        return [torch.device("cpu")] * int(several[1] or 1)
    if isinstance(devices, str) and devices.isdigit():
        devices = [int(devices)]
    if not devices:
        raise UserError("devices: the list names no GPU; write auto, cpu, cuda, all or numbers like [0]")
    if isinstance(devices, str) and devices not in ("cuda", "all"):
        raise UserError(
            f"devices: {devices!r} is unknown; write auto, cpu, cpu x N, cuda, all or a list of GPU numbers like [0]"
        )
    if not available:
        raise UserError(f"devices: {devices} asks for a GPU, but this machine offers none to torch; use devices: cpu")
    numbers = range(available) if devices == "all" else [0] if devices == "cuda" else devices
    for number in numbers:
        if not isinstance(number, int) or not 0 <= number < available:
            raise UserError(f"devices: GPU {number} does not exist here; there are {available}, numbered from 0")
    if len(set(numbers)) != len(list(numbers)) or not numbers:
        raise UserError(f"devices: {devices} must name at least one GPU, each once")
    return [torch.device("cuda", int(number)) for number in numbers]


def prepare(devices: str | list[int], threads: int, nodes: tuple[int, ...] = (0,), rank: int = 0) -> torch.device:
    """The device of `rank`, with its number of compute threads set (0: torch's choice, the cores shared by a node's ranks).

    nodes: the node of each rank. UserError if a node has more ranks than GPUs. Freed memory stays in the process: a training
    step frees and takes the same large blocks again and again; glibc would hand each back to the kernel, which must then clear
    its pages anew. Keeping them made a step about a tenth faster.
    """
    beside = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    found = choose(devices if devices not in ("auto", "cuda") or len(beside) == 1 else _all_of(devices))
    if found[0].type == "cpu":
        own = found[0]
    elif len(beside) > len(found):
        raise UserError(
            f"devices: {len(beside)} ranks share {len(found)} GPU{'s' * (len(found) > 1)} on host {socket.gethostname()};"
            " start at most one rank per GPU, or use devices: cpu"
        )
    else:
        own = found[beside.index(rank)]
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
