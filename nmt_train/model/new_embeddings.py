"""Embeddings of pieces that a vocabulary has gained."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nmt_train.corpus.new_pieces import parts_of_new
from nmt_train.corpus.vocabulary import SOURCE, TARGET, Vocabulary

# The parameters with a row for each piece, and the side of these pieces.
_BY_PIECE = {"source_embedding": SOURCE, "target_embedding": TARGET, "output_embedding": TARGET, "output_bias": TARGET}


def with_new_pieces(parameters: Mapping[str, Tensor], new: Vocabulary, old: Vocabulary) -> dict[str, Tensor]:
    """The parameters of a model, by name, for a vocabulary whose first pieces are those of `old`, which the model has.

    A new piece gets the mean of the embeddings (and of the output biases) of the old pieces that its text consists of, as in
    "Fast vocabulary transfer" (Gee et al. 2022, section 3). Everything else stays the same, bit for bit.
    """
    found = dict(parameters)
    for name, side in _BY_PIECE.items() if new.digest != old.digest else ():
        parts = parts_of_new(new, old, side)
        if name in found and parts:
            matrix = found[name]
            found[name] = torch.cat([matrix, torch.stack([matrix[ids].mean(0) for ids in parts])])
    return found
