"""Which low-bit codec a device uses."""

from __future__ import annotations

import functools
import socket

import torch

from nmt_train.codec.compiled_low_bit import CompiledLowBit
from nmt_train.codec.low_bit import LowBit
from nmt_train.common.streams import tell

# With a row that is zero and one that is tiny: their magnitudes have the largest codes.
_TRIED = [[0.0, 0.0, 0.0], [3e-7, -1e-7, 2e-7], [1.0, -0.5, 0.25]]


@functools.cache
def low_bit_for(own: torch.device) -> type[LowBit]:
    """The fastest class that works. If Triton does not work, a line on stderr says that this GPU is slower than it could be."""
    if own.type == "cpu":
        return CompiledLowBit
    if own.type == "cuda":
        try:
            from nmt_train.codec.gpu_low_bit import GpuLowBit

            _try(GpuLowBit, own)
            return GpuLowBit
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # not installed, without a C compiler or headers of Python, too new or old for this GPU
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
            where = f"Triton does not work on host {socket.gethostname()} ({reason})"
            tell(f"nmt-train: warning: low-bit is slower than it could be: {where}")
    return LowBit


def _try(kind: type[LowBit], own: torch.device) -> None:
    """Raise RuntimeError if it does not encode and decode as LowBit does."""
    tried = torch.tensor(_TRIED, device=own)
    for values in (2, 3):
        ours, right = (its([(3, 3)], values, tried.new_empty(3, 9)) for its in (kind, LowBit))
        message, found, wanted = right.encode(tried.flatten(), 0), tried.new_empty(9), tried.new_empty(9)
        ours.decode(message, found)
        right.decode(message, wanted)
        if not torch.equal(found, wanted) or not torch.equal(ours.encode(tried.flatten(), 0).tensors[2], message.tensors[2]):
            raise RuntimeError("wrong results")
