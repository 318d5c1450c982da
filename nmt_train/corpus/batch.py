"""A batch: sentence pairs as padded tensors of piece ids."""

from __future__ import annotations

import math
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

    def __len__(self) -> int:
        return len(self.source)

    def to(self, device: torch.device) -> Batch:
        """Return the same batch with its tensors on `device`."""
        if device.type == "cpu":
            return self
        moved = {
            name: value.pin_memory().to(device, non_blocking=True)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return Batch(**{**vars(self), **moved})


class Turn(NamedTuple):
    """What a worker trains on in one step.

    batch: None if the worker has no batch, but other workers may have one. last: whether the worker's share of the epoch ends
    here. epochs: how much of the corpus has been trained before this turn, the same for all workers with the same turn.
    """

    batch: Any
    last: bool
    epochs: float = 0.0


def assemble(source: list[np.ndarray], target: list[np.ndarray], pairs: tuple[int, ...] = ()) -> Batch:
    """Pad sentences (ids without begin or end) into a `Batch`."""
    source_ids = pad([np.append(ids, END) for ids in source])
    target_in = pad([np.concatenate(([BEGIN], ids)) for ids in target])
    target_out = pad([np.append(ids, END) for ids in target])
    source_filled, filled = source_ids != PAD, target_out != PAD
    return Batch(
        source=source_ids,
        source_mask=padding_mask(source_ids),
        target_in=target_in,
        target_out=target_out,
        target_filled=None if filled.all() else filled.flatten().nonzero().flatten(),
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


def pad(sentences: list[np.ndarray]) -> Tensor:
    """Return the ids as an int64 tensor (sentences, longest), padded with PAD on the right."""
    ids = np.full((len(sentences), max(map(len, sentences))), PAD, dtype=np.int64)
    for row, sentence in zip(ids, sentences, strict=True):
        row[: len(sentence)] = sentence
    return torch.from_numpy(ids)


def padding_mask(ids: Tensor) -> Tensor | None:
    """Return (sentences, 1, 1, length): -inf where `ids` (sentences, length) is padding, else 0; None without padding."""
    padding = ids == PAD
    if not padding.any():
        return None
    return torch.zeros(ids.shape).masked_fill_(padding, -math.inf)[:, None, None, :]
