"""The messages between ranks: a few numbers and tensors. Receivers validate a message before they use it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nmt_train.common.errors import UserError

DTYPES = (torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8)


class Malformed(UserError):
    """A message does not hold what its receiver expects; the error text names the sender."""


@dataclass(frozen=True)
class Message:
    """numbers: 64-bit integers. tensors: one-dimensional, with types from `DTYPES`. origin: the sender, for error messages."""

    numbers: tuple[int, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    origin: str = field(default="this rank", compare=False)

    @property
    def bytes(self) -> int:
        """Size of the tensors [bytes], without the numbers, which the transport sends in a short header."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def and_numbers(self, *numbers: int) -> Message:
        """The message with `numbers` prepended to its own."""
        return Message(numbers + self.numbers, self.tensors, self.origin)

    def without_numbers(self, count: int) -> Message:
        """The message without its first `count` numbers."""
        return Message(self.numbers[count:], self.tensors, self.origin)

    def on(self, device: torch.device) -> Message:
        """The message with its tensors moved from the CPU to `device`."""
        if device.type == "cpu":
            return self
        return Message(self.numbers, tuple(tensor.to(device, non_blocking=True) for tensor in self.tensors), self.origin)

    def number(self, place: int = 0) -> int:
        if len(self.numbers) <= place:
            raise self.malformed(f"{len(self.numbers)} numbers, at least {place + 1} expected")
        return self.numbers[place]

    def vectors(self, *expected: tuple[torch.dtype, int | None]) -> tuple[Tensor, ...]:
        """The tensors. Raises Malformed if they do not have these types and lengths (None: any length)."""
        if len(self.tensors) != len(expected) or any(
            tensor.dtype != dtype or length not in (None, tensor.numel())
            for tensor, (dtype, length) in zip(self.tensors, expected, strict=True)
        ):
            found = [(tensor.dtype, tensor.numel()) for tensor in self.tensors]
            raise self.malformed(f"vectors (type, length) {found}, expected {list(expected)}")
        return self.tensors

    def vector(self, elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The only tensor. Raises Malformed if it does not have this length and type."""
        return self.vectors((dtype, elements))[0]

    def malformed(self, what: str) -> Malformed:
        return Malformed(
            f"a message from {self.origin} is not as it should be: {what}; check that all ranks run the same version, and"
            " that nobody else can reach their network"
        )

    @contextmanager
    def understood(self) -> Iterator[None]:
        """A context for parsing the contents: converts errors inside it to Malformed."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError, StopIteration, OverflowError) as error:
            raise self.malformed(f"{type(error).__name__}: {error}") from error


def from_json(value: Any) -> Message:
    """A message that carries JSON text."""
    return from_bytes(json.dumps(value).encode())


def to_json(message: Message) -> Any:
    with message.understood():
        return json.loads(to_bytes(message))


def to_facts(message: Message, *keys: str) -> dict[str, Any]:
    """The JSON object in a message. Raises Malformed if it is not an object with at least these keys."""
    facts = to_json(message)
    if not isinstance(facts, dict) or not set(keys) <= facts.keys():
        raise message.malformed(f"it must be a JSON object with {' and '.join(keys)}")
    return facts


def from_bytes(data: bytes) -> Message:
    return Message((), (torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy()),))


def to_bytes(message: Message) -> bytes:
    """The bytes of the first tensor."""
    with message.understood():
        return message.tensors[0].numpy().tobytes()
