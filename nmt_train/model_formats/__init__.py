"""Folders of other programs: models are exported to them and imported from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# The programs that `nmt-export` writes folders for, each with the modules that this needs and their packages.
TARGETS = {
    "huggingface": {"tokenizers": "tokenizers", "google.protobuf": "protobuf"},
    "ctranslate2": {"ctranslate2": "ctranslate2"},
    "marian": {},
}
# The number formats of weights that CTranslate2 stores besides fp32, with its names for them.
QUANTIZATIONS = {"int8": "int8", "bf16": "bfloat16", "fp16": "float16"}
POSITIONS = 2048  # maximum number of pieces in a sentence: the rows of the position table
LONGEST_TRANSLATION = 512  # pieces; transformers cannot limit the output relative to the source length
SENTENCEPIECE = "sentencepiece.model"  # the vocabulary in an exported folder
MARIAN_MODEL, MARIAN_CONFIG = "model.npz", "decoder.yml"  # in a folder for Marian
SENTENCEPIECE_PAIR = ("source.spm", "target.spm")  # the same with one SentencePiece model for each side


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
