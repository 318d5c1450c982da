"""The codecs, which encode vectors as messages. To add a codec, add a file here and a row to `CODECS`."""

from nmt_train.codec.codec import Codec
from nmt_train.codec.dense import BFloat16, Dense, Truncated
from nmt_train.codec.half import Half
from nmt_train.codec.int8 import Int8
from nmt_train.codec.strom_threshold import StromThreshold
from nmt_train.codec.tile_topk import TileTopK
from nmt_train.codec.topk import TopK

CODECS: dict[str, type[Codec]] = {
    "dense": Dense,
    "half": Half,
    "bf16": BFloat16,
    "truncated": Truncated,
    "int8": Int8,
    "threshold": StromThreshold,
    "top-k": TopK,
    "tile-top-k": TileTopK,
}
