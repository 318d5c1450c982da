"""All-reduce: adds up vectors of all ranks, so that all have the same sum."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from nmt_train.codec.codec import Codec
from nmt_train.common.errors import NotFinite
from nmt_train.common.message import Message
from nmt_train.optim.flat_model import add
from nmt_train.replicas.owned_matrices import OwnedMatrices
from nmt_train.strategy.background import Stages, finish
from nmt_train.strategy.context import BuildContext
from nmt_train.strategy.plan import ReplicasPlan
from nmt_train.strategy.state import Vectors
from nmt_train.trace import Trace
from nmt_train.transport import Messages, Tag

FINITE, NOT_FINITE, NO_BATCH = 1, 0, 2  # the first number of a message; none: the rank had no batch


def encoded(codec: Codec, vector: Tensor, update: int, weight: int) -> Message:
    """The message for `vector`, with its weight; if it cannot be encoded, a message that says so."""
    try:
        return codec.encode(vector, update).and_numbers(FINITE, weight)
    except NotFinite:
        return Message((NOT_FINITE, weight))


class Reduction(NamedTuple):
    """divisor: dividing the reduced vector by it gives the mean; 1 if it already is the mean. weight: of all ranks in total."""

    divisor: float
    weight: int


class Reducer(ABC):
    """Sums the vectors of all ranks; all ranks must call it at the same point of training.

    codecs: which values of `replicas.codec` it can use: summable (codecs whose sums can be encoded again), any, or own (none,
    because it has codecs of its own).
    keeps_residual_until_complete: the residual changes when all parts of a vector have been reduced, not when they are encoded.
    rate: what it multiplies vectors by.
    has_owners: one rank has the mean of a part before the others get it, and can direct the matrices in it (see `own`).
    """

    codecs: ClassVar[str] = "summable"
    keeps_residual_until_complete: ClassVar[bool] = False
    rate: float = 1.0
    has_owners: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def build(cls, context: BuildContext, settings: ReplicasPlan) -> Reducer: ...

    @abstractmethod
    def reduce(self, vector: Tensor, update: int, weight: int = 1) -> Reduction:
        """Replace `vector` (elements,) by the weighted sum or mean of all ranks' vectors, with the same bits on every rank.

        A rank with weight 0 contributes nothing. update: a number of updates that is the same on all ranks.

        If a rank's vector contains infinities or NaN, so does the sum on every rank; no rank is left waiting.
        """

    def stages(self, vector: Tensor, update: int, weight: int = 1, start: int = 0) -> Stages[Reduction]:
        """`reduce` in stages (see BackgroundTask), also for a part of a vector, which begins at `start`.

        All ranks must reduce the same parts; if a part begins before another one is over, in the order of BackgroundTask.
        """
        yield from ()  # makes this a generator, which yields nothing
        return self.reduce(vector, update, weight)

    def parts(self, elements: int, most: int) -> list[slice]:
        """At most `most` slices of a vector (elements,) that can be reduced one by one; together, they are the whole vector."""
        parts = min(most, elements)
        return [slice(elements * part // parts, elements * (part + 1) // parts) for part in range(parts)]

    def own(self, matrices: OwnedMatrices) -> None:
        """From now on, the means of these matrices' gradients are replaced by directions where they are computed."""
        raise AssertionError("a reducer without owners")

    def add_late(self, gradient: Tensor) -> bool:
        """Add a gradient of the first elements, which came too late for this sum, to the residual; False if there is none."""
        if self.residual is None:
            return False
        late = self.residual[: gradient.numel()]
        add(late, gradient, out=late)
        return True

    @property
    def unapplied(self) -> Tensor | None:
        """This rank's part (elements,) of the last sum until `applied` or `undo` is called; None: it is the whole vector."""
        return None

    def applied(self) -> None:
        """Called when the last sum has been applied."""
        return None

    def undo(self) -> None:
        """Called if no rank applies the last sum: take back what this rank has sent, if the residual has changed."""
        return None

    @property
    def residual(self) -> Tensor | None:
        """What the last sums left out of this rank's vectors (elements,), which the next sum adds; None if there is none."""
        return None

    def state(self) -> Vectors:
        """Other vectors that the reducer keeps from one sum to the next, equal on all ranks."""
        return {}

    def load(self, vectors: Mapping[str, Tensor]) -> None:
        """Continue from what `state` returned; forget an interrupted sum."""
        return None


class StagedReducer(Reducer):
    """Reduces in several stages."""

    def reduce(self, vector: Tensor, update: int, weight: int = 1, start: int = 0) -> Reduction:
        return finish(self.stages(vector, update, weight, start))

    @abstractmethod
    def stages(self, vector: Tensor, update: int, weight: int = 1, start: int = 0) -> Stages[Reduction]: ...


class EncodingReducer(Reducer):
    """Sends encoded parts of vectors. Each message also carries the total weight of the ranks in its partial sum."""

    def __init__(self, transport: Messages, codec: Codec, trace: Trace) -> None:
        self._transport, self._codec, self._trace = transport, codec, trace

    @classmethod
    def build(cls, context: BuildContext, settings: ReplicasPlan) -> Reducer:
        return cls(context.transport, context.codec(settings.codec, context.plan.dropped_up), context.trace)

    def _send(self, to: int, message: Message) -> Any:
        return self._transport.send(to, Tag.REDUCE, message)

    def _encode(self, block: Tensor, update: int, weight: int) -> Message:
        with self._trace.span("encode", self._codec.cost_elements(block.numel())):
            return encoded(self._codec, block, update, weight)

    def _take(self, source: int, block: Tensor, add: bool) -> Message:
        """Receive a block from another rank; add it to `block`, or replace `block` by it."""
        with self._trace.span("waiting"):
            message: Message = self._transport.receive(source, Tag.REDUCE).result()[1]
        with self._trace.span("decode", block.numel() if add else self._codec.cost_elements(block.numel())):
            self._decode(message, block, add)
        return message

    def _decode(self, message: Message, block: Tensor, add: bool = False) -> None:
        if message.number() == NOT_FINITE:
            block.fill_(torch.nan)
            return
        bare = message.without_numbers(2).on(block.device)
        if add:
            self._codec.add(bare, block)
        elif not any(tensor.data_ptr() == block.data_ptr() for tensor in bare.tensors):
            self._codec.decode(bare, block)
