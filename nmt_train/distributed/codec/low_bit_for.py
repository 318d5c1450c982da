"""Which low-bit codec a device uses."""

from __future__ import annotations

import functools
import socket

import torch

from nmt_train.distributed.codec.compiled_low_bit import CompiledLowBit
from nmt_train.distributed.codec.low_bit import LowBit


@functools.cache
def low_bit_for(own: torch.device) -> tuple[type[LowBit], str]:
    """The class, and a warning if Triton does not work on this machine, so that its GPU is slower than it could be; else ""."""
    if own.type == "cpu":
        return CompiledLowBit, ""
    if own.type != "cuda":
        return LowBit, ""
    try:
        from nmt_train.distributed.codec.gpu_low_bit import GpuLowBit

        GpuLowBit([(1, 1)], 2, torch.empty(3, 1, device=own)).encode(torch.ones(1, device=own), 0)
    except Exception as error:  # Triton is not installed, knows this GPU not, or finds no C compiler or no headers of Python
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        return LowBit, f"low-bit is slower than it could be: Triton does not work on host {socket.gethostname()} ({reason})"
    return GpuLowBit, ""
