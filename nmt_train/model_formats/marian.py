"""Reads and writes MarianMT models, such as those of OPUS-MT, in Hugging Face's format.

They are post-norm transformers with an output bias, a SentencePiece model for each side, and one table of ids for both. Their
decoder starts with the embedding of padding; ours starts with BEGIN. An imported model therefore has one more piece: BEGIN gets
the embedding and bias of their padding, and our padding gets a zero embedding and a bias that makes it improbable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from nmt_train.common.errors import UserError, unreadable
from nmt_train.common.section import problem
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
from nmt_train.model_formats.weights import from_bart, layers, to_bart
from nmt_train.run.checkpoint import read_tensors

_NEVER = -20.0  # a very low logit; with -inf, label smoothing would make the cost infinite
_PYTORCH, _SAFETENSORS = "pytorch_model.bin", "model.safetensors"
# The values that config.json must have for a model that we support. None: the key may be missing.
_NEEDED: dict[str, tuple[Any, ...]] = {
    "model_type": ("marian",),
    "activation_function": ("swish", "silu", "relu"),
    "scale_embedding": (True,),
    "static_position_embeddings": (True, None),
    "normalize_before": (False, None),
    "normalize_embedding": (False, None),
    "add_final_layer_norm": (False, None),
}


def read(folder: Path) -> tuple[ModelConfig, VocabularyPair, dict[str, Tensor]]:
    """Read a MarianMT folder; return its configuration, its vocabulary and its parameters under our names.

    Raises UserError if a file is missing or damaged, or if the model is of a kind that we do not support.
    """
    found = _json(folder / "config.json")
    config = _config(found, folder)
    if (folder / "target_vocab.json").exists():
        raise UserError(f"{folder / 'target_vocab.json'}: source and target have ids of their own; such a model cannot be read")
    table = _json(folder / "vocab.json")
    ids = _order(table, folder)
    pieces = {number: piece for piece, number in table.items()}
    begin = next(name for name in ("<s>", "<begin>", "<<begin>>") if name not in table)
    names = [begin if place == BEGIN else pieces[number] for place, number in enumerate(ids)]
    source, target = (_bytes(folder / name) for name in SENTENCEPIECE_PAIR)
    vocabulary = VocabularyPair.join(source, target, names, str(folder))
    return config, vocabulary, _parameters(_tensors(folder), config, torch.tensor(ids), folder)


def write(model: Transformer, vocabulary: Vocabulary, search: SearchConfig, folder: Path, settings: dict[str, Any]) -> None:
    """Write the model and its tokenizer into an existing folder: the reverse of `read`.

    vocabulary: with two SentencePiece models, and one table of ids for both or, as `SeparateVocabularies`, one for each.
    settings: further entries of config.json.
    """
    config, separate = model.config, isinstance(vocabulary, SeparateVocabularies)
    orders = [_their_order(len(vocabulary.of(side)), separate) for side in (SOURCE, TARGET)]
    source, target = (torch.tensor(order) for order in orders)
    tensors = to_bart(model.state_dict(), config)
    named: dict[str, tuple[Tensor, Tensor]] = {"model.shared.weight": (model.target_embedding, target)}
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
    save_file(tensors, folder / _SAFETENSORS, {"format": "pt"})
    eos, unknown, pad = 0, 1, orders[TARGET].index(BEGIN)
    special = {"eos_token_id": eos, "pad_token_id": pad, "decoder_start_token_id": pad, "forced_eos_token_id": None}
    values = settings | special | {"bos_token_id": eos, "vocab_size": len(source), "decoder_vocab_size": len(target)}
    write_json(folder / "config.json", values)
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
    for name, content in zip(SENTENCEPIECE_PAIR, vocabulary.models, strict=True):
        (folder / name).write_bytes(content)
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
    for key, allowed in _NEEDED.items():
        if found.get(key) not in allowed:
            raise UserError(
                f"{folder / 'config.json'}: {key} is {found.get(key)!r}; only models with {allowed[0]!r} can be read"
            )
    for left, right in (
        ("encoder_ffn_dim", "decoder_ffn_dim"), ("encoder_attention_heads", "decoder_attention_heads"),
        ("vocab_size", "decoder_vocab_size"),
    ):  # fmt: skip
        if found.get(right) not in (found.get(left), None):
            raise UserError(f"{folder / 'config.json'}: {left} and {right} differ; only models with equal ones can be read")
    shared, tied = found.get("share_encoder_decoder_embeddings", True), found.get("tie_word_embeddings", True)
    if shared and not tied:
        raise UserError(
            f"{folder / 'config.json'}: tie_word_embeddings is false, but share_encoder_decoder_embeddings is true;"
            " such a model cannot be read"
        )
    try:
        return ModelConfig(
            encoder_layers=found["encoder_layers"], decoder_layers=found["decoder_layers"], dim=found["d_model"],
            ffn_dim=found["encoder_ffn_dim"], heads=found["encoder_attention_heads"], norm="post",
            tied="all" if shared else "target-output" if tied else "none",
            activation="relu" if found["activation_function"] == "relu" else "swish", output_bias=True,
            dropout=found.get("dropout", 0.1), dropout_attention=found.get("attention_dropout", 0.0),
            dropout_ffn=found.get("activation_dropout", 0.0),
        )  # fmt: skip
    except (KeyError, ValidationError) as error:
        why = f"{error.args[0]} is missing" if isinstance(error, KeyError) else problem(error).text
        raise UserError(
            f"{folder / 'config.json'}: not the configuration of a MarianMT model: {why}; give another folder"
        ) from None


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
    def embedding(*names: str) -> Tensor:
        matrix = next((found[name] for name in names if name in found), None)
        if matrix is None or matrix.shape != (len(ids) - 1, config.dim):
            raise UserError(f"{folder}: {names[0]} is missing, or is not one vector of {config.dim} per piece")
        matrix = matrix.float()[ids]
        matrix[PAD] = 0.0
        return matrix

    try:
        parameters = from_bart(found, config)
        bias = found["final_logits_bias"].float().flatten()[ids].clamp_min(_NEVER)
    except (KeyError, IndexError, RuntimeError) as error:
        raise UserError(f"{folder}: a parameter is missing or too short ({error}); it is not a MarianMT model") from None
    bias[PAD] = _NEVER
    shared, decoder = "model.shared.weight", "model.decoder.embed_tokens.weight"
    parameters["target_embedding"] = embedding(*((shared, decoder) if config.tied == "all" else (decoder, shared)))
    if config.tied != "all":
        parameters["source_embedding"] = embedding("model.encoder.embed_tokens.weight")
    if config.tied == "none":
        parameters["output_embedding"] = embedding("lm_head.weight")
    parameters["output_bias"] = bias
    _compare(parameters, found, config, len(ids), folder)
    return parameters


def _compare(
    parameters: Mapping[str, Tensor], found: Mapping[str, Tensor], config: ModelConfig, pieces: int, folder: Path
) -> None:
    """Raise UserError if config.json describes another model than the weights are of."""
    with torch.device("meta"):
        wanted = {name: parameter.shape for name, parameter in Transformer(config, pieces).named_parameters()}
    wrong = [name for name in wanted if name not in parameters or parameters[name].shape != wanted[name]]
    known = {theirs for _, names in layers(config) for theirs in names}
    wrong += [name for name in found if ".layers." in name and name not in known]
    if wrong:
        raise UserError(f"{folder}: {wrong[0]} does not fit config.json; it describes another model than the weights are of")


def _tensors(folder: Path) -> dict[str, Tensor]:
    try:
        if (folder / _SAFETENSORS).exists():
            return read_tensors(folder / _SAFETENSORS)
        loaded = torch.load(folder / _PYTORCH, map_location="cpu", weights_only=True)  # executes no code from the file
        return {str(name): tensor for name, tensor in loaded.items() if isinstance(tensor, Tensor)}
    except FileNotFoundError:
        raise UserError(f"{folder}: has neither {_SAFETENSORS} nor {_PYTORCH}; give the folder of a MarianMT model") from None
    except (
        SafetensorError,
        OSError,
        RuntimeError,
        ValueError,
        EOFError,
        AttributeError,
        LookupError,
        UnpicklingError,
    ) as error:
        raise UserError(
            f"{folder}: its weights cannot be read ({type(error).__name__}); download them again, or run git lfs pull"
        ) from None


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{unreadable(path, error)}; give the folder of a MarianMT model (to continue from a model of nmt_train, set init)"
        ) from None


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(_bytes(path))
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise UserError(f"{path}: not a JSON object; give the folder of a MarianMT model")
    return values
