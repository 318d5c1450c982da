"""Reads and writes M2M100 models in Hugging Face's format; dense NLLB models are M2M100 models with other languages.

They are pre-norm transformers with one embedding matrix. Their sources begin with the piece of a language, their decoder begins
with END and the piece of another. Ours (`model.conventions: m2m100`) has one pair of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nmt_train.common.errors import UserError
from nmt_train.corpus.vocabulary import BEGIN, END, PAD, UNKNOWN, Vocabulary
from nmt_train.model import ModelConfig
from nmt_train.model.transformer import Transformer
from nmt_train.model_formats import POSITIONS, m2m100_vocabulary, tokenizer, write_json
from nmt_train.model_formats.huggingface_folder import (
    CONFIG,
    SAFETENSORS,
    SHARED,
    compare,
    embedding,
    layer_parameters,
    model_config,
    weights,
)  # fmt: skip
from nmt_train.model_formats.weights import to_bart

# The values that config.json must have for a model that we support. None: the key may be missing. Positions begin behind the
# id of padding.
_NEEDED: dict[str, tuple[Any, ...]] = {
    "activation_function": ("relu", "swish", "silu"),
    "scale_embedding": (True, None),
    "tie_word_embeddings": (True, None),
    "pad_token_id": (1, None),
    "eos_token_id": (2, None),
    "decoder_start_token_id": (2, None),
}
_EMBEDDINGS = (SHARED, "model.decoder.embed_tokens.weight", "model.encoder.embed_tokens.weight", "lm_head.weight")


def read(
    folder: Path, found: Mapping[str, Any], pair: tuple[str | None, str | None]
) -> tuple[ModelConfig, Vocabulary, dict[str, Tensor]]:
    """Read a folder; return the configuration, the vocabulary and the parameters of a model of ours.

    found: the content of config.json. pair: the languages of source and target, as the model names them. Raises UserError if
    a file is missing or damaged, if the model is of a kind that we do not support, or if it has no such language.
    """
    config = model_config(found, folder, _NEEDED, norm="pre", tied="all", conventions="m2m100")
    rows = found.get("vocab_size")
    if type(rows) is not int:
        raise UserError(f"{folder / CONFIG}: vocab_size is {rows!r}, not the number of embeddings; download it again")
    vocabulary, ids = m2m100_vocabulary.read(folder, rows, pair)
    tensors = weights(folder)
    parameters = layer_parameters(tensors, config, folder)
    parameters["target_embedding"] = embedding(tensors, _EMBEDDINGS, (rows, config.dim), folder)[torch.tensor(ids)]
    compare(parameters, tensors, config, len(ids), folder)
    return config, vocabulary, parameters


def write(
    model: Transformer, vocabulary: Vocabulary, folder: Path, settings: dict[str, Any], generation: dict[str, Any]
) -> None:
    """Write the model and its tokenizer, for its pair of languages, into an existing folder.

    settings, generation: further entries of config.json and of generation_config.json. Raises UserError if an M2M100 model
    cannot represent the model.
    """
    config = model.config
    if (config.norm, config.tied, config.output_bias) != ("pre", "all", False):
        raise UserError(
            "--to huggingface: with model.conventions: m2m100, transformers has only models with model.norm: pre, model.tied:"
            " all and no output bias; export to ctranslate2"
        )
    order = tokenizer.with_languages(len(vocabulary))
    tensors = to_bart(model.state_dict(), config) | {SHARED: model.target_embedding.detach().cpu()[torch.tensor(order)]}
    save_file(tensors, folder / SAFETENSORS, {"format": "pt"})
    ids = {"pad_token_id": order.index(PAD), "eos_token_id": END, "bos_token_id": END, "decoder_start_token_id": END}
    write_json(folder / CONFIG, settings | ids)
    # Not BEGIN: `generate` would suppress it at the beginning, too.
    begins = {"forced_bos_token_id": BEGIN, "suppress_tokens": [order.index(PAD), order.index(UNKNOWN)]}
    write_json(folder / "generation_config.json", generation | ids | begins)
    tokenizer.write(vocabulary, folder, "PreTrainedTokenizerFast", POSITIONS, languages=True)
