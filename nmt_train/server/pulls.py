"""A worker's requests to all shards that are independent of its pushes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nmt_train.common.message import Message
from nmt_train.server.requests import Pull
from nmt_train.transport import Future, Tag, Transport


class Pulls:
    """shards: the slice of the parameters of each rank. pushes: whether this worker pushes anything."""

    def __init__(self, transport: Transport, shards: Sequence[slice], pushes: bool) -> None:
        self._transport, self._shards, self._pushes = transport, shards, pushes

    def ask(self, kind: Pull, has: Tensor | None = None, wants_mean: bool = False) -> list[tuple[int, Future[Any]]]:
        """The rank and the future answer of each shard."""
        asked = []
        for rank, shard in enumerate(self._shards):
            if shard.start < shard.stop:
                vectors = () if has is None else (has[shard].clone(),)
                self._transport.send(rank, Tag.PULL, Message((kind, int(self._pushes), int(wants_mean)), vectors))
                asked.append((rank, self._transport.receive(rank, Tag.PULLED)))
        return asked

    def copy(self, wants_mean: bool) -> Future[Tensor]:
        """The global parameters, or their running mean, gathered while training continues."""
        elements = max(shard.stop for shard in self._shards)
        return _GatheredCopy(elements, [(self._shards[rank], answer) for rank, answer in self.ask(Pull.COPY, None, wants_mean)])


class _GatheredCopy:
    """A future of a vector (elements,) whose slices are still being received."""

    def __init__(self, elements: int, parts: list[tuple[slice, Future[Any]]]) -> None:
        self._elements, self._parts = elements, parts

    def done(self) -> bool:
        return all(part.done() for _, part in self._parts)

    def result(self) -> Tensor:
        vector = torch.empty(self._elements)
        for place, part in self._parts:
            vector[place] = part.result()[1].vector(place.stop - place.start)
        return vector
