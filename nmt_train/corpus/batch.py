"""A batch: sentence pairs as padded tensors of piece ids."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nmt_train.corpus.vocabulary import BEGIN, END, PAD

_ORDINARY = 256  # sentence length in pieces; up to it, attention needs less memory than the rest of the model


@dataclass(frozen=True)
class Batch:
    """Sentence pairs as int64 ids, padded with PAD to equal length.

    source: (sentences, source length); each sentence ends with END.
    source_mask: (sentences, 1, 1, source length); 0 on pieces and -inf on padding, or None without padding.
    target_in, target_out: (sentences, target length); target_in begins with BEGIN, target_out ends with END.
    target_filled: (target_tokens,); the positions of pieces in the flattened target_out, or None without padding.
    source_tokens, target_tokens: the numbers of pieces, END included. pairs: the numbers of the pairs in their store, if any.
    weights: (sentences,), fp32; how much each pair counts in the cost, or None if all count 1.
    links, link_shares: (links,), int64 and fp32, or None; the places in the flattened (sentences, target length,
    source length) to which the guided attention head should attend, and the share that each should have.
    """

    source: Tensor
    source_mask: Tensor | None
    target_in: Tensor
    target_out: Tensor
    target_filled: Tensor | None
    source_tokens: int
    target_tokens: int
    pairs: tuple[int, ...] = ()
    weights: Tensor | None = None
    links: Tensor | None = None
    link_shares: Tensor | None = None

    def __len__(self) -> int:
        return len(self.source)

    def pinned(self) -> Batch:
        """Return the same batch in memory from which a GPU can copy while the CPU continues."""
        return self._each(Tensor.pin_memory)

    def to(self, device: torch.device) -> Batch:
        """Return the same batch with its tensors on `device`."""
        if device.type == "cpu":
            return self
        return self._each(lambda tensor: (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        changed = {name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return Batch(**{**vars(self), **changed})


class Turn(NamedTuple):
    """What a worker trains on in one step.

    batch: None if the worker has no batch, but other workers may have one. last: whether the worker's share of the epoch ends
    here. epochs: how much of the corpus has been trained before this turn, the same for all workers with the same turn.
    """

    batch: Any
    last: bool
    epochs: float = 0.0

    def pinned(self) -> Turn:
        """The same with its batch, if any, in memory from which a GPU can copy while the CPU continues."""
        return self if self.batch is None else self._replace(batch=self.batch.pinned())


def assemble(source: list[np.ndarray], target: list[np.ndarray], pairs: tuple[int, ...] = ()) -> Batch:
    """Pad sentences (ids without begin or end) into a `Batch`."""
    filled = _filled(target)
    source_filled = _filled(source)
    return Batch(
        source=pad(source),
        source_mask=_mask(~source_filled),
        target_in=pad(target, begins=True),
        target_out=pad(target),
        target_filled=None if filled.all() else torch.from_numpy(np.flatnonzero(filled)),
        source_tokens=int(source_filled.sum()),
        target_tokens=int(filled.sum()),
        pairs=pairs,
    )


def fitting(longest: int, tokens: int) -> int:
    """Return how many sentences fit in an inference batch whose longest side has `longest` pieces.

    tokens: the maximum of sentences times pieces. Above _ORDINARY pieces, the cost grows with the square of the length, as the
    memory of attention does.
    """
    return max(1, int(tokens / (longest * max(1.0, longest / _ORDINARY))))


def pad(sentences: list[np.ndarray], begins: bool = False) -> Tensor:
    """Return sentences (ids without begin or end) as an int64 tensor (sentences, longest + 1), padded with PAD on the right.

    begins: whether BEGIN comes before each sentence; else END comes after it.
    """
    filled = _filled(sentences)
    ids = np.full(filled.shape, PAD, dtype=np.int64)
    longest = filled.shape[1] - 1
    ids[:, begins : longest + begins][filled[:, 1:]] = np.concatenate(sentences)
    if begins:
        ids[:, 0] = BEGIN
    else:
        ids[np.arange(len(sentences)), filled.sum(1) - 1] = END
    return torch.from_numpy(ids)


def _filled(sentences: list[np.ndarray]) -> np.ndarray:
    """Where sentences with one more id than they have are not padding (sentences, longest + 1)."""
    lengths = np.fromiter(map(len, sentences), np.int64, len(sentences)) + 1
    filled: np.ndarray = np.arange(lengths.max()) < lengths[:, None]
    return filled


def padding_mask(ids: Tensor) -> Tensor | None:
    """Return (sentences, 1, 1, length): -inf where `ids` (sentences, length) is padding, else 0; None without padding."""
    return _mask((ids == PAD).numpy())


def _mask(padding: np.ndarray) -> Tensor | None:
    """`padding_mask` of the places of padding (sentences, length)."""
    if not padding.any():
        return None
    return torch.from_numpy(np.where(padding, np.float32(-math.inf), np.float32(0)))[:, None, None, :]
