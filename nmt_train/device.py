"""The device that a rank drives, and what makes it fast: threads, the allocator, reduced precision."""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager, nullcontext

import torch

from nmt_train.errors import UserError

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def choose(devices: str | list[int]) -> list[torch.device]:
    """The devices named by `devices:` (`auto`, `cpu`, `cuda`, `all`, or a list of GPU numbers).

    UserError where CUDA is asked for and absent, or a number names no GPU.
    """
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices == "auto":
        return [torch.device("cuda", 0)] if available else [torch.device("cpu")]
    if devices == "cpu":
        return [torch.device("cpu")]
    if isinstance(devices, str) and devices.isdigit():
        devices = [int(devices)]
    if not devices:
        raise UserError("devices: the list names no GPU; write auto, cpu, cuda, all or numbers like [0]")
    if isinstance(devices, str) and devices not in ("cuda", "all"):
        raise UserError(f"devices: {devices!r} is unknown; write auto, cpu, cuda, all or a list of GPU numbers like [0]")
    if not available:
        raise UserError(f"devices: {devices} asks for a GPU, but this machine offers none to torch; use devices: cpu")
    numbers = range(available) if devices == "all" else [0] if devices == "cuda" else devices
    for number in numbers:
        if not isinstance(number, int) or not 0 <= number < available:
            raise UserError(f"devices: GPU {number} does not exist here; there are {available}, numbered from 0")
    if len(set(numbers)) != len(list(numbers)) or not numbers:
        raise UserError(f"devices: {devices} must name at least one GPU, each once")
    return [torch.device("cuda", int(number)) for number in numbers]


def prepare(threads: int) -> None:
    """Set the number of compute threads (0: torch's default) and keep freed memory in the process.

    A training step frees and takes the same large blocks again and again; glibc would hand each back to the kernel,
    which must then clear its pages anew. Keeping them made a step about a tenth faster.
    """
    if threads:
        torch.set_num_threads(threads)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return  # another C library: only speed is lost
    mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_M_TOP_PAD, 1 << 28)


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """The context for forward passes: nothing for `fp32`, torch's bfloat16 autocast for `bf16`."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
