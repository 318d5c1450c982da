"""A part of the global parameters as one rank knows it; recovery combines these pieces after ranks have ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nmt_train.common.message import Message, from_json, to_json
from nmt_train.optim.flat_model import cpu_copy
from nmt_train.optim.optimizer import Optimizer


@dataclass
class RecoveryPiece:
    """The slice `place` of the global parameters, as one rank has it, after `updates` updates.

    vectors: on the CPU, by name, each as long as `place`: the parameters and, if known, their running mean and the optimizer's
    vectors. numbers: the optimizer's counters, as in `Optimizer.state`, if its vectors are known. exact: the parameters are
    exactly those after these updates; otherwise some changes may be missing, or other changes included.
    """

    place: slice
    updates: int
    vectors: dict[str, Tensor]
    numbers: dict[str, Any] | None = None
    exact: bool = True

    @classmethod
    def of(cls, place: slice, optimizer: Optimizer) -> RecoveryPiece:
        """A piece with a copy of all vectors and numbers of an optimizer."""
        vectors, numbers = optimizer.everything()
        return cls(place, optimizer.updates, {name: cpu_copy(vector) for name, vector in vectors.items()}, numbers)

    def facts(self) -> dict[str, Any]:
        """Everything except the values of the vectors."""
        place = [self.place.start, self.place.stop]
        return {"place": place, "updates": self.updates, "names": list(self.vectors), "numbers": self.numbers,
                "exact": self.exact}  # fmt: skip

    def pack(self) -> Message:
        return Message((), (*from_json(self.facts()).tensors, *self.vectors.values()))

    @classmethod
    def unpack(cls, message: Message) -> RecoveryPiece:
        with message.understood():
            facts = to_json(message)
            vectors = dict(zip(facts["names"], message.tensors[1:], strict=True))
            start, stop = facts["place"]
            if {vector.numel() for vector in vectors.values()} - {stop - start}:
                raise ValueError(f"vectors whose length does not match the slice from {start} to {stop}")
            return cls(slice(start, stop), int(facts["updates"]), vectors, facts["numbers"], bool(facts["exact"]))
