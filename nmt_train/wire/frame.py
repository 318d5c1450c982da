"""How a message is laid out in bytes: a header of 64-bit integers, then, if they are short, the contents of its tensors.

The header: tag, slot (0: the contents follow; else the MPI tag under which they come), how many numbers and tensors there are,
the numbers, and a type and a length for every tensor.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nmt_train.message import DTYPES, Message

_ALIGNED = 8  # bytes
_FIXED = 4  # integers


def contents(message: Message) -> list[np.ndarray]:
    """The bytes of every tensor, without copying."""
    return [tensor.reshape(-1).view(torch.uint8).numpy() for tensor in message.tensors]


def pack(tag: int, slot: int, message: Message) -> np.ndarray:
    """The frame (bytes,) of a message."""
    header = [tag, slot, len(message.numbers), len(message.tensors), *message.numbers]
    for tensor in message.tensors:
        header += [DTYPES.index(tensor.dtype), tensor.numel()]
    frame = np.array(header, dtype=np.int64).view(np.uint8)
    if slot:
        return frame
    return np.concatenate([frame, *(np.pad(part, (0, -part.size % _ALIGNED)) for part in contents(message))])


def unpack(frame: np.ndarray) -> tuple[int, int, Message]:
    """Tag, slot and message of a frame; with a slot, the tensors are still to be filled."""
    tag, slot, numbers, tensors = (int(value) for value in frame[: 8 * _FIXED].view(np.int64))
    start, end = 8 * (_FIXED + numbers), 8 * (_FIXED + numbers + 2 * tensors)
    values = tuple(int(value) for value in frame[8 * _FIXED : start].view(np.int64))
    shapes = frame[start:end].view(np.int64).reshape(-1, 2)
    message = Message(values, tuple(torch.empty(int(length), dtype=DTYPES[int(kind)]) for kind, length in shapes))
    if not slot:
        for part in contents(message):
            part[:] = frame[end : end + part.size]
            end += part.size + -part.size % _ALIGNED
    return tag, slot, message


def on_host(tensor: Tensor) -> Tensor:
    """The tensor itself, or its copy in pinned memory if it is on a GPU."""
    if not tensor.is_cuda:
        return tensor.contiguous()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return pinned
