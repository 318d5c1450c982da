"""Converts parameter names between our models and Hugging Face's encoder-decoder models, which all use the names of BART."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from nmt_train.model import ModelConfig

_ENCODER = {
    "attention.query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.output": ("self_attn.out_proj",),
    "attention_residual.norm": ("self_attn_layer_norm",),
    "ffn.inner": ("fc1",),
    "ffn.outer": ("fc2",),
    "ffn_residual.norm": ("final_layer_norm",),
}
_DECODER = _ENCODER | {
    "cross.query": ("encoder_attn.q_proj",),
    "cross.key_value": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "cross.output": ("encoder_attn.out_proj",),
    "cross_residual.norm": ("encoder_attn_layer_norm",),
}


def layers(config: ModelConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield our name and Hugging Face's names of each parameter of the layers; we store several of theirs as one matrix."""
    for side, number, names in (("encoder", config.encoder_layers, _ENCODER), ("decoder", config.decoder_layers, _DECODER)):
        for layer in range(number):
            for ours, theirs in names.items():
                for kind in ("weight", "bias"):
                    yield (
                        f"{side}.{layer}.{ours}.{kind}",
                        tuple(f"model.{side}.layers.{layer}.{name}.{kind}" for name in theirs),
                    )
        if config.norm == "pre":
            for kind in ("weight", "bias"):
                yield f"{side}_norm.{kind}", (f"model.{side}.layer_norm.{kind}",)


def to_bart(parameters: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the layers' parameters under Hugging Face's names; fused projections are split. Embeddings are left out."""
    found: dict[str, Tensor] = {}
    for ours, theirs in layers(config):
        parts = parameters[ours].chunk(len(theirs))
        found |= {name: part.contiguous() for name, part in zip(theirs, parts, strict=True)}
    return found


def from_bart(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The reverse of `to_bart`; KeyError if a parameter is missing. Parameters become fp32."""
    return {ours: torch.cat([tensors[name].float() for name in theirs]) for ours, theirs in layers(config)}
