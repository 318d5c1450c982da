"""Codecs by name, with settings that show what they do on small vectors."""

from __future__ import annotations

from nmt_train.codec.config import DroppingConfig, ThresholdConfig, TileConfig
from nmt_train.codec.dense import BFloat16, Dense, Truncated
from nmt_train.codec.half import Half
from nmt_train.codec.int8 import Int8
from nmt_train.codec.strom_threshold import StromThreshold
from nmt_train.codec.tile_topk import TileTopK
from nmt_train.codec.topk import TopK

CODECS = {
    "dense": lambda: Dense(),
    "half": lambda: Half(),
    "top-k": lambda: TopK(DroppingConfig(values="fp32", indices="int32"), 0.9),
    "top-k, sampled": lambda: TopK(DroppingConfig(), 0.99, sample=100),
    "top-k, with a part in full": lambda: TopK(DroppingConfig(flush=100), 0.99),
}
ROUNDED = {  # their parts of a vector may be larger than its elements, and what is left is rounded as the largest
    "bf16": lambda: BFloat16(),
    "truncated": lambda: Truncated(),
    "int8": lambda: Int8(),
    "tile-top-k, 2 bits": lambda: TileTopK(TileConfig(keep=64)),
    "tile-top-k, other tiles": lambda: TileTopK(TileConfig(size=100, keep=7)),
    "threshold, words": lambda: StromThreshold(ThresholdConfig(tau=0.5, coding="words")),
    "threshold, golomb-rice": lambda: StromThreshold(ThresholdConfig(tau=1e-4)),
    "threshold, by density": lambda: StromThreshold(ThresholdConfig(density=0.1)),
}
