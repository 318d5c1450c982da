"""Writes models as CTranslate2 folders. CTranslate2 is a fast translation engine for CPUs and GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nmt_train.corpus.vocabulary import BEGIN, END, SOURCE, TARGET, UNKNOWN, Vocabulary
from nmt_train.model.attention import Attention
from nmt_train.model.layers import DecoderLayer, EncoderLayer, FeedForward, Residual
from nmt_train.model.transformer import Transformer
from nmt_train.model_formats import POSITIONS, QUANTIZATIONS, SENTENCEPIECE, SENTENCEPIECE_PAIR


def write(model: Transformer, vocabulary: Vocabulary, quantize: str | None, folder: Path) -> None:
    """Write the model and the SentencePiece model into an existing folder. quantize: one of QUANTIZATIONS; None: fp32."""
    from ctranslate2.specs import transformer_spec
    from ctranslate2.specs.common_spec import Activation

    config = model.config
    spec = transformer_spec.TransformerSpec.from_config(
        (config.encoder_layers, config.decoder_layers),
        config.heads,
        pre_norm=config.norm == "pre",
        activation=Activation.RELU if config.activation == "relu" else Activation.SWISH,
        alignment_layer=(config.guided_alignment.layer or 0) - 1,  # without a guided head, the last layer: its default
        alignment_heads=1,
    )
    spec.config.bos_token = vocabulary.piece(BEGIN)
    spec.config.decoder_start_token = vocabulary.piece(END if config.languages else BEGIN)  # languages: BEGIN is a prefix
    spec.config.eos_token, spec.config.unk_token = vocabulary.piece(END), vocabulary.piece(UNKNOWN)
    spec.config.add_source_eos, spec.config.layer_norm_epsilon = True, config.layer_norm_epsilon
    for its, register in (
        (vocabulary.of(SOURCE), spec.register_source_vocabulary), (vocabulary.of(TARGET), spec.register_target_vocabulary)
    ):  # fmt: skip
        register([its.piece(number) for number in range(len(its))])
    positions = model.position_table(POSITIONS, torch.device("cpu"))
    spec.encoder.embeddings[0].weight = _array(model.source_matrix)
    spec.decoder.embeddings.weight = _array(model.target_lookups)
    spec.decoder.projection.weight = _array(model.output_matrix)
    if (bias := model.prediction_bias) is not None:
        spec.decoder.projection.bias = _array(bias)
    for side in (spec.encoder, spec.decoder):
        side.position_encodings.encodings = _array(positions)
    for encoder, theirs in zip(model.encoder, spec.encoder.layer, strict=True):
        _layer(encoder, theirs)
    for decoder, theirs in zip(model.decoder, spec.decoder.layer, strict=True):
        _layer(decoder, theirs)
        _attention(decoder.cross, decoder.cross_residual, theirs.attention)
    if config.norm == "pre":
        _norm(model.encoder_norm, spec.encoder.layer_norm)
        _norm(model.decoder_norm, spec.decoder.layer_norm)
    spec.validate()
    spec.optimize(quantization=QUANTIZATIONS[quantize] if quantize else None)
    spec.save(str(folder))
    models = vocabulary.models
    for name, content in zip((SENTENCEPIECE,) if len(models) == 1 else SENTENCEPIECE_PAIR, models, strict=True):
        (folder / name).write_bytes(content)


def _layer(ours: EncoderLayer | DecoderLayer, spec: Any) -> None:
    _attention(ours.attention, ours.attention_residual, spec.self_attention)
    _feed_forward(ours.ffn, ours.ffn_residual, spec.ffn)


def _attention(ours: Attention, residual: Residual, spec: Any) -> None:
    projections = [ours.query, ours.key_value] if ours.cross else [ours.query_key_value]
    for linear, linear_spec in zip([*projections, ours.output], spec.linear, strict=True):
        _linear(linear, linear_spec)
    _norm(residual.norm, spec.layer_norm)


def _feed_forward(ours: FeedForward, residual: Residual, spec: Any) -> None:
    _linear(ours.inner, spec.linear_0)
    _linear(ours.outer, spec.linear_1)
    _norm(residual.norm, spec.layer_norm)


def _linear(ours: nn.Linear, spec: Any) -> None:
    spec.weight, spec.bias = _array(ours.weight), _array(ours.bias)


def _norm(ours: nn.Module, spec: Any) -> None:
    assert isinstance(ours, nn.LayerNorm)
    spec.gamma, spec.beta = _array(ours.weight), _array(ours.bias)


def _array(tensor: Tensor) -> Any:
    return tensor.detach().cpu().float().contiguous().numpy()
