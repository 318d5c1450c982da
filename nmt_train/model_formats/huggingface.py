"""Writes models as folders that Hugging Face transformers loads without custom code.

A pre-norm model becomes a Pegasus model, a post-norm model a Marian model: both have the same architecture as ours. Like
CTranslate2's converter, they start the decoder with padding (piece 0), and we start it with BEGIN. The export therefore swaps
the embeddings of these two pieces. Neither of them occurs in a text. A model with languages becomes an M2M100 model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nmt_train.common.errors import UserError
from nmt_train.corpus.vocabulary import BEGIN, END, PAD, UNKNOWN, Vocabulary
from nmt_train.model import ModelConfig
from nmt_train.model.beam_search import SearchConfig
from nmt_train.model.transformer import Transformer
from nmt_train.model_formats import LONGEST_TRANSLATION, POSITIONS, m2m100, marian, tokenizer, write_json
from nmt_train.model_formats.weights import to_bart


def needs_transformers_5(config: ModelConfig) -> bool:
    """Whether transformers 4 would load the model without an error, but would use the target embeddings for the source."""
    return config.norm == "pre" and config.tied != "all"


def write(model: Transformer, vocabulary: Vocabulary, search: SearchConfig, folder: Path) -> None:
    """Write the model, its tokenizer and its search settings into an existing folder."""
    config = model.config
    if config.conventions == "marian":
        raise UserError("--to huggingface: transformers has other sinusoids than Marian; export to ctranslate2 or to marian")
    if config.languages:
        return m2m100.write(model, vocabulary, folder, _config(config, len(vocabulary)), _generation(search))
    if len(vocabulary.models) == 2:
        if config.norm == "pre":
            raise UserError(
                "--to huggingface: transformers has no tokenizer with two SentencePiece models for a pre-norm model; export to"
                " ctranslate2, or train with model.norm: post"
            )
        return marian.write(model, vocabulary, search, folder, _config(config, len(vocabulary)))
    # `refused` writes two names that transformers 4 does not know, so that it rejects the folder.
    refused = needs_transformers_5(config)
    save_file(_tensors(model), folder / "model.safetensors", {"format": "transformers 5" if refused else "pt"})
    write_json(folder / "config.json", _config(config, len(vocabulary)))
    write_json(folder / "generation_config.json", _generation(search))
    tokenizer.write(vocabulary, folder, "TokenizersBackend" if refused else "PreTrainedTokenizerFast", POSITIONS)


def _tensors(model: Transformer) -> dict[str, Tensor]:
    config = model.config
    tensors = to_bart(model.state_dict(), config)
    source, target, output = map(_exchanged, (model.source_matrix, model.target_embedding, model.output_matrix))
    positions = model.position_table(POSITIONS, torch.device("cpu")).clone()
    tensors |= {f"model.{side}.embed_positions.weight": positions.clone() for side in ("encoder", "decoder")}
    bias = torch.zeros(len(target)) if model.output_bias is None else _exchanged(model.output_bias)
    tensors["final_logits_bias"] = bias[None]
    if config.tied == "all":
        return tensors | {"model.shared.weight": target}
    tensors |= {"model.encoder.embed_tokens.weight": source, "model.decoder.embed_tokens.weight": target}
    if config.norm == "pre":
        return tensors | {"model.shared.weight": target.clone(), "lm_head.weight": output.clone()}
    return tensors | ({"lm_head.weight": output} if config.tied == "none" else {})


def _exchanged(embedding: Tensor) -> Tensor:
    """Return a copy of `embedding` (pieces, ...) in which the rows PAD and BEGIN are swapped."""
    copy = embedding.detach().cpu().clone()
    copy[[PAD, BEGIN]] = copy[[BEGIN, PAD]]
    return copy


def _config(config: ModelConfig, pieces: int) -> dict[str, Any]:
    pre = config.norm == "pre"
    kind, name = ("pegasus", "PegasusForConditionalGeneration") if pre else ("marian", "MarianMTModel")
    if config.languages:
        kind, name = "m2m_100", "M2M100ForConditionalGeneration"
    settings: dict[str, Any] = {
        "architectures": [name],
        "model_type": kind,
        "vocab_size": pieces,
        "d_model": config.dim,
        "activation_function": config.activation,
        "scale_embedding": True,
        "static_position_embeddings": True,
        "max_position_embeddings": POSITIONS,
        "is_encoder_decoder": True,
        "pad_token_id": PAD,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
        "decoder_start_token_id": PAD,
        "forced_eos_token_id": None,
        "dropout": config.dropout,
        "attention_dropout": config.dropout_attention,
        "activation_dropout": config.dropout_ffn,
        "tie_word_embeddings": config.tied == "all" or (not pre and config.tied == "target-output"),
        "torch_dtype": "float32",
    }
    for side, number in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        settings |= {f"{side}_layers": number, f"{side}_attention_heads": config.heads, f"{side}_ffn_dim": config.ffn_dim}
        settings[f"{side}_layerdrop"] = 0.0
    if pre:
        return settings | {"normalize_before": True, "normalize_embedding": False, "add_final_layer_norm": True}
    return settings | {"share_encoder_decoder_embeddings": config.tied == "all", "decoder_vocab_size": pieces}


def _generation(search: SearchConfig) -> dict[str, Any]:
    """Settings that make `generate` search as we do, except that the maximum length of a translation differs."""
    return {
        "num_beams": search.beam,
        "length_penalty": search.normalization,
        "early_stopping": False,
        "max_length": LONGEST_TRANSLATION,
        "suppress_tokens": [PAD, UNKNOWN, BEGIN],
        "decoder_start_token_id": PAD,
        "pad_token_id": PAD,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
        "forced_eos_token_id": None,  # a translation is broken off at its maximum length
    }
