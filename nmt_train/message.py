"""What ranks say to each other: a few numbers, and tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

DTYPES = (torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8)


@dataclass(frozen=True)
class Message:
    """`numbers` are 64-bit integers; `tensors` are one-dimensional, each of one of `DTYPES`."""

    numbers: tuple[int, ...] = ()
    tensors: tuple[Tensor, ...] = ()

    @property
    def bytes(self) -> int:
        """Size of the tensors. The numbers travel in a wire's own few bytes of framing, which are left out."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def and_numbers(self, *numbers: int) -> Message:
        """The same message with further numbers in front."""
        return Message(numbers + self.numbers, self.tensors)

    def without_numbers(self, count: int) -> Message:
        """The message without its first `count` numbers."""
        return Message(self.numbers[count:], self.tensors)


def from_json(value: Any) -> Message:
    """A message that carries JSON text."""
    return from_bytes(json.dumps(value).encode())


def to_json(message: Message) -> Any:
    return json.loads(to_bytes(message))


def from_bytes(data: bytes) -> Message:
    return Message((), (torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy()),))


def to_bytes(message: Message) -> bytes:
    return message.tensors[0].numpy().tobytes()
