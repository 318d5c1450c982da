"""The layers of the transformer (Vaswani et al. 2017, section 3), with pre- or post-norm."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from nmt_train.model import ModelConfig
from nmt_train.model.attention import Attention
from nmt_train.model.dropout import dropout


class FeedForward(nn.Module):
    """Two matrix products with a nonlinearity between them (section 3.3)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.inner = nn.Linear(config.dim, config.ffn_dim)
        self.outer = nn.Linear(config.ffn_dim, config.dim)
        self.drop, self._relu = config.dropout_ffn, config.activation == "relu"

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.inner(x)) if self._relu else F.silu(self.inner(x))
        return self.outer(dropout(inner, self.drop, self.training))


class Residual(nn.Module):
    """Returns x + block(norm(x)), or norm(x + block(x)) for post-norm, with dropout on the output of the block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.dim, eps=config.layer_norm_epsilon)
        self.pre, self.drop = config.norm == "pre", config.dropout

    def forward(self, x: Tensor, block: Callable[[Tensor], Tensor]) -> Tensor:
        if self.pre:
            return x + dropout(block(self.norm(x)), self.drop, self.training)
        return self.norm(x + dropout(block(x), self.drop, self.training))


class EncoderLayer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = Attention(config.dim, config.heads, config.dropout_attention, cross=False, rank=config.lora_rank)
        self.attention_residual = Residual(config)
        self.ffn = FeedForward(config)
        self.ffn_residual = Residual(config)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.attention_residual(x, lambda y: self.attention(y, None, mask))
        return self.ffn_residual(x, self.ffn)


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = Attention(config.dim, config.heads, config.dropout_attention, cross=False, rank=config.lora_rank)
        self.attention_residual = Residual(config)
        self.cross = Attention(config.dim, config.heads, config.dropout_attention, cross=True, rank=config.lora_rank)
        self.cross_residual = Residual(config)
        self.ffn = FeedForward(config)
        self.ffn_residual = Residual(config)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None, watch: list[Tensor] | None = None) -> Tensor:
        x = self.attention_residual(x, lambda y: self.attention(y, None, None, causal=True))
        keys_values = self.cross.project_memory(memory)
        x = self.cross_residual(x, lambda y: self.cross(y, keys_values, mask, watch=watch))
        return self.ffn_residual(x, self.ffn)
