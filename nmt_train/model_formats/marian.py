"""Reads and writes MarianMT models, such as those of OPUS-MT, in Hugging Face's format.

They are post-norm transformers with an output bias, a SentencePiece model for each side, and one table of ids for both. Their
decoder starts with the embedding of padding; ours starts with BEGIN. An imported model therefore has one more piece: BEGIN gets
the embedding and bias of their padding, and our padding gets a zero embedding and a bias that makes it improbable.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nmt_train.common.errors import UserError
from nmt_train.corpus.vocabulary import (
    BEGIN,
    END,
    PAD,
    SOURCE,
    TARGET,
    UNKNOWN,
    SeparateVocabularies,
    Vocabulary,
    VocabularyPair,
)  # fmt: skip
from nmt_train.model import ModelConfig
from nmt_train.model.beam_search import SearchConfig
from nmt_train.model.transformer import Transformer
from nmt_train.model_formats import LONGEST_TRANSLATION, SENTENCEPIECE_PAIR, write_json
from nmt_train.model_formats.huggingface_folder import (
    CONFIG,
    SAFETENSORS,
    SHARED,
    compare,
    content,
    embedding,
    json_object,
    layer_parameters,
    model_config,
    weights,
)  # fmt: skip
from nmt_train.model_formats.weights import to_bart

_NEVER = -20.0  # a very low logit; with -inf, label smoothing would make the cost infinite
# The values that config.json must have for a model that we support. None: the key may be missing.
_NEEDED: dict[str, tuple[Any, ...]] = {
    "activation_function": ("swish", "silu", "relu"),
    "scale_embedding": (True,),
    "static_position_embeddings": (True, None),
    "normalize_before": (False, None),
    "normalize_embedding": (False, None),
    "add_final_layer_norm": (False, None),
}


def read(folder: Path, found: Mapping[str, Any]) -> tuple[ModelConfig, VocabularyPair, dict[str, Tensor]]:
    """Read a MarianMT folder; return its configuration, its vocabulary and its parameters under our names.

    found: the content of config.json. Raises UserError if a file is missing or damaged, or if the model is of a kind that we do
    not support.
    """
    config = _config(found, folder)
    if (folder / "target_vocab.json").exists():
        raise UserError(f"{folder / 'target_vocab.json'}: source and target have ids of their own; such a model cannot be read")
    table = json_object(folder / "vocab.json")
    ids = _order(table, folder)
    pieces = {number: piece for piece, number in table.items()}
    begin = next(name for name in ("<s>", "<begin>", "<<begin>>") if name not in table)
    names = [begin if place == BEGIN else pieces[number] for place, number in enumerate(ids)]
    source, target = (content(folder / name) for name in SENTENCEPIECE_PAIR)
    vocabulary = VocabularyPair.join(source, target, names, str(folder))
    return config, vocabulary, _parameters(weights(folder), config, torch.tensor(ids), folder)


def write(model: Transformer, vocabulary: Vocabulary, search: SearchConfig, folder: Path, settings: dict[str, Any]) -> None:
    """Write the model and its tokenizer into an existing folder: the reverse of `read`.

    vocabulary: with two SentencePiece models, and one table of ids for both or, as `SeparateVocabularies`, one for each.
    settings: further entries of config.json.
    """
    config, separate = model.config, isinstance(vocabulary, SeparateVocabularies)
    orders = [_their_order(len(vocabulary.of(side)), separate) for side in (SOURCE, TARGET)]
    source, target = (torch.tensor(order) for order in orders)
    tensors = to_bart(model.state_dict(), config)
    named: dict[str, tuple[Tensor, Tensor]] = {SHARED: (model.target_embedding, target)}
    if config.tied != "all":
        named = {
            "model.encoder.embed_tokens.weight": (model.source_matrix, source),
            "model.decoder.embed_tokens.weight": (model.target_embedding, target),
        }
    if config.tied == "none":
        named["lm_head.weight"] = (model.output_matrix, target)
    tensors |= {name: matrix.detach().cpu()[place] for name, (matrix, place) in named.items()}
    bias = torch.zeros(len(target)) if model.output_bias is None else model.output_bias.detach().cpu()[target]
    tensors["final_logits_bias"] = bias[None]
    save_file(tensors, folder / SAFETENSORS, {"format": "pt"})
    eos, unknown, pad = 0, 1, orders[TARGET].index(BEGIN)
    special = {"eos_token_id": eos, "pad_token_id": pad, "decoder_start_token_id": pad, "forced_eos_token_id": None}
    values = settings | special | {"bos_token_id": eos, "vocab_size": len(source), "decoder_vocab_size": len(target)}
    write_json(folder / CONFIG, values)
    generation = {
        "bad_words_ids": [[pad]],
        "suppress_tokens": [unknown],
        "max_length": LONGEST_TRANSLATION,
        "num_beams": search.beam,
        "length_penalty": search.normalization,
        "early_stopping": False,
    }
    write_json(folder / "generation_config.json", special | generation)
    for side, table in enumerate(("vocab.json", "target_vocab.json") if separate else ("vocab.json",)):
        names = (_their_name(vocabulary.of(side), number) for number in orders[side])
        write_json(folder / table, {name: number for number, name in enumerate(names)})
    for name, model_of_side in zip(SENTENCEPIECE_PAIR, vocabulary.models, strict=True):
        (folder / name).write_bytes(model_of_side)
    tokenizer = {"tokenizer_class": "MarianTokenizer", "model_max_length": LONGEST_TRANSLATION}
    write_json(folder / "tokenizer_config.json", tokenizer | ({"separate_vocabs": True} if separate else {}))


def _their_order(pieces: int, separate: bool) -> list[int]:
    """Our ids in the order of theirs, without our padding: BEGIN becomes their padding, which has one id in both tables."""
    if separate:
        return [END, UNKNOWN, BEGIN, *range(END + 1, pieces)]
    return [END, UNKNOWN, *range(END + 1, pieces), BEGIN]


def _their_name(vocabulary: Vocabulary, number: int) -> str:
    return {BEGIN: "<pad>", UNKNOWN: "<unk>", END: "</s>"}.get(number) or vocabulary.piece(number)


def _config(found: Mapping[str, Any], folder: Path) -> ModelConfig:
    shared, tied = found.get("share_encoder_decoder_embeddings", True), found.get("tie_word_embeddings", True)
    if shared and not tied:
        raise UserError(
            f"{folder / CONFIG}: tie_word_embeddings is false, but share_encoder_decoder_embeddings is true;"
            " such a model cannot be read"
        )
    return model_config(
        found, folder, _NEEDED, norm="post", tied="all" if shared else "target-output" if tied else "none", output_bias=True
    )


def _order(table: Mapping[str, Any], folder: Path) -> list[int]:
    """Return their id for each of our ids; BEGIN has the id of their padding."""
    numbers = [number for number in table.values() if type(number) is int]
    if sorted(numbers) != list(range(len(table))) or not {"<pad>", "<unk>", "</s>"} <= table.keys():
        raise UserError(
            f"{folder / 'vocab.json'}: not the table of a MarianMT model: it needs <pad>, <unk>, </s>, and all ids from 0 on;"
            " give the folder of a MarianMT model"
        )
    pad, unknown, end = (table[name] for name in ("<pad>", "<unk>", "</s>"))
    return [pad, unknown, pad, end, *(number for number in range(len(numbers)) if number not in (pad, unknown, end))]


def _parameters(found: Mapping[str, Tensor], config: ModelConfig, ids: Tensor, folder: Path) -> dict[str, Tensor]:
    def embeddings(*names: str) -> Tensor:
        matrix = embedding(found, names, (len(ids) - 1, config.dim), folder)[ids]
        matrix[PAD] = 0.0
        return matrix

    parameters = layer_parameters(found, config, folder)
    try:
        bias = found["final_logits_bias"].float().flatten()[ids].clamp_min(_NEVER)
    except (KeyError, IndexError) as error:
        raise UserError(f"{folder}: a parameter is missing or too short ({error}); it is not a MarianMT model") from None
    bias[PAD] = _NEVER
    decoder = "model.decoder.embed_tokens.weight"
    parameters["target_embedding"] = embeddings(*((SHARED, decoder) if config.tied == "all" else (decoder, SHARED)))
    if config.tied != "all":
        parameters["source_embedding"] = embeddings("model.encoder.embed_tokens.weight")
    if config.tied == "none":
        parameters["output_embedding"] = embeddings("lm_head.weight")
    parameters["output_bias"] = bias
    compare(parameters, found, config, len(ids), folder)
    return parameters
