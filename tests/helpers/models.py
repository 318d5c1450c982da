"""Models whose parameters are all random, so that no two of them could be exchanged unseen, and batches for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from nmt_train.corpus.batch import Batch, assemble
from nmt_train.corpus.vocabulary import END
from nmt_train.model import ModelConfig
from nmt_train.model.transformer import Transformer


def random_model(pieces: int | list[int], norm: str = "pre", tied: str = "all", **changes: Any) -> Transformer:
    torch.manual_seed(1)
    sizes = {"encoder_layers": 2, "decoder_layers": 3, "dim": 32, "ffn_dim": 48, "heads": 4}
    config = ModelConfig(**{**sizes, "norm": norm, "tied": tied, **changes})  # type: ignore[arg-type]
    model = Transformer(config, pieces)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def random_batch(pieces: int, lengths: tuple[int, ...] = (7, 3, 12), seed: int = 1) -> Batch:
    random = np.random.default_rng(seed)
    source, target = ([random.integers(END + 1, pieces, length + more) for length in lengths] for more in (0, 2))
    return assemble(source, target)
