"""Multi-head attention (Vaswani et al. 2017, section 3.2), with one matrix product for all projections of one input."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmt_train.model.dropout import dropout
from nmt_train.model.lora import AdaptedLinear


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, drop: float, causal: bool = False) -> Tensor:
    """Return softmax(query key^T / sqrt(dim) + mask) value; query, key and value are (batch, heads, length, dim).

    mask: broadcast to (batch, heads, query length, key length). drop: the probability that an attention weight is dropped.
    causal: no position attends to later ones. On the CPU, a few plain operations are faster for short sentences than torch's
    fused kernel (four times in bfloat16).
    """
    if query.device.type != "cpu":
        return fused(query, key, value, mask, drop, causal)
    if causal:
        length = query.shape[2]
        mask = torch.full((length, length), -math.inf, dtype=query.dtype).triu_(1)
    with torch.autocast("cpu", enabled=False):  # autocast would convert the scores to fp32 and back for the softmax
        scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
        if mask is not None:
            scores += mask
        return dropout(torch.softmax(scores, dim=-1), drop, training=True) @ value


def fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, drop: float, causal: bool) -> Tensor:
    """`attend` by torch's fused kernels; the fastest of them takes `causal`, but no mask."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=drop, is_causal=causal)


def log_weights(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """Return the logarithms of the attention weights of one head, fp32 (batch, query length, key length).

    query, key: (batch, length, dim). mask: broadcast to the result. Other than in `attend`, no weights are dropped.
    """
    with torch.autocast(query.device.type, enabled=False):
        scores = ((query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)).float()
        return torch.log_softmax(scores if mask is None else scores + mask, dim=-1)


class Attention(nn.Module):
    """Projections around `attend`. Self-attention computes queries, keys and values from its input with one matrix product."""

    def __init__(self, dim: int, heads: int, drop: float, cross: bool, rank: int | None = None) -> None:
        """rank: that of the factors that are trained instead of the projections (see lora.py); None: no factors."""
        super().__init__()
        self.heads, self.drop, self.cross = heads, drop, cross
        linear = nn.Linear if rank is None else partial(AdaptedLinear, rank=rank)
        if cross:
            self.query = linear(dim, dim)
            self.key_value = linear(dim, 2 * dim)
        else:
            self.query_key_value = linear(dim, 3 * dim)
        self.output = linear(dim, dim)

    def forward(
        self, x: Tensor, memory: tuple[Tensor, Tensor] | None, mask: Tensor | None, causal: bool = False,
        watch: list[Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Let `x` (batch, length, dim) attend to itself or to `memory` (see `project_memory`); return (batch, length, dim).

        watch: the `log_weights` of the first head are appended to it.
        """
        if self.cross:
            assert memory is not None
            query, (key, value) = self._split(self.query(x), 1)[0], memory
        else:
            query, key, value = self._split(self.query_key_value(x), 3)
        if watch is not None:
            watch.append(log_weights(query[:, 0], key[:, 0], None if mask is None else mask[:, 0]))
        return self._finish(query, key, value, mask, causal)

    def project_memory(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values (batch, heads, length, dim / heads) of the encoder output (batch, length, dim)."""
        key, value = self._split(self.key_value(memory), 2)
        return key, value

    def extend(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Let one new position `x` (rows, 1, dim) attend to the `past` keys and values and to itself.

        Return the output (rows, 1, dim), and the keys and values (rows, heads, length, dim / heads) including the new ones.
        """
        query, key, value = self._split(self.query_key_value(x), 3)
        if past is not None:
            key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
        return self._finish(query, key, value, None), (key, value)

    def _finish(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
        context = attend(query, key, value, mask, self.drop if self.training else 0.0, causal)
        return self.output(context.transpose(1, 2).flatten(2))

    def _split(self, projected: Tensor, parts: int) -> tuple[Tensor, ...]:
        """Split (batch, length, parts * dim) into `parts` tensors (batch, heads, length, dim / heads)."""
        each = projected.chunk(parts, dim=-1) if parts > 1 else (projected,)  # whose gradients one operation joins
        return tuple(part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in each)
