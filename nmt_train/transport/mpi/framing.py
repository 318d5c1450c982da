"""The byte layout of a message: a header of 64-bit integers, followed by the contents of its tensors if they are short.

The header holds the tag, the slot (0: the contents follow; otherwise the MPI tag under which they are sent), the number of
numbers and of tensors, the numbers, and the type and length of every tensor.
"""

from __future__ import annotations

from collections.abc import Container

import numpy as np
import torch
from torch import Tensor

from nmt_train.common.message import DTYPES, Message

_ALIGNED = 8  # bytes
_FIXED = 4  # integers
SLOTS = 30_000  # every MPI library allows tags up to 32,767


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


def unpack(frame: np.ndarray, origin: str, longest: int, tags: Container[int]) -> tuple[int, int, Message]:
    """Tag, slot and message of a frame (bytes,) from `origin`. If the slot is not 0, the tensors are not filled.

    Raises Malformed, before it allocates memory, if the tag is not in `tags`, the header contradicts itself, or the tensors are
    longer than `longest` bytes in total.
    """
    refused = Message(origin=origin).malformed
    if frame.size < 8 * _FIXED or frame.size % 8:
        raise refused(f"a header of {frame.size} bytes")
    header = frame.view(np.int64)
    tag, slot, numbers, tensors = (int(value) for value in header[:_FIXED])
    words = header.size - _FIXED
    if tag not in tags or not 0 <= slot <= SLOTS or not 0 <= numbers <= words or not 0 <= 2 * tensors <= words - numbers:
        raise refused(f"tag {tag}, slot {slot}, {numbers} numbers and {tensors} vectors in {frame.size} bytes")
    values = header[_FIXED : _FIXED + numbers].tolist()
    end = 8 * (_FIXED + numbers + 2 * tensors)
    shapes = [(int(kind), int(length)) for kind, length in header[_FIXED + numbers : end // 8].reshape(-1, 2)]
    if any(not 0 <= kind < len(DTYPES) or not 0 <= length <= longest for kind, length in shapes):
        raise refused(f"vectors of types and lengths {shapes[:4]}")
    sizes = [length * DTYPES[kind].itemsize for kind, length in shapes]
    if sum(sizes) > longest:
        raise refused(f"{sum(sizes):,} bytes, more than transport.longest, {longest:,}")
    follow = 0 if slot else sum(size + -size % _ALIGNED for size in sizes)
    if frame.size - end != follow:
        raise refused(f"{frame.size - end} bytes after the header instead of {follow}")
    message = Message(tuple(values), tuple(torch.empty(length, dtype=DTYPES[kind]) for kind, length in shapes), origin)
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
