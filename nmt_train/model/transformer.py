"""The transformer of Vaswani et al. (2017), with pre- or post-norm, tied embeddings and a step-wise decoder for search."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmt_train.corpus.batch import Batch
from nmt_train.corpus.vocabulary import BEGIN, END, LANGUAGE, PAD
from nmt_train.model import ModelConfig
from nmt_train.model.dropout import drop_words, dropout
from nmt_train.model.layers import DecoderLayer, EncoderLayer
from nmt_train.model.lora import freeze
from nmt_train.model.loss import cross_entropy, guided_cross_entropy, log_probabilities, smoothed_cross_entropy
from nmt_train.model.positions import sinusoids

_NEVER = -1e4  # a logit whose probability is 0, and which fp16 can represent


@dataclass
class DecoderState:
    """The decoder state between steps, for `sentences` * `beam` hypotheses.

    memory: for each layer, the keys and values of the source (sentences, heads, source, dim / heads), which the hypotheses of
    a sentence share. mask: added to the attention scores (sentences, 1, 1, source), or None. past: for each layer, the keys and
    values of earlier steps (sentences * beam, heads, steps, dim / heads), or None before the first step. steps: their number.
    """

    memory: list[tuple[Tensor, Tensor]]
    mask: Tensor | None
    past: list[tuple[Tensor, Tensor] | None]
    steps: int = 0

    def select(self, sentences: Tensor | None, hypotheses: Tensor) -> None:
        """Keep the given sentences (None: all of them) and hypotheses, in the given order."""
        self.past = [None if p is None else (p[0][hypotheses], p[1][hypotheses]) for p in self.past]
        if sentences is not None:
            self.memory = [(key[sentences], value[sentences]) for key, value in self.memory]
            self.mask = None if self.mask is None else self.mask[sentences]


class Transformer(nn.Module):
    """An encoder-decoder model; `vocabulary` is the number of pieces, or [source, target] if each has a vocabulary of its own.
    `Batch` defines the ids and the padding.
    """

    def __init__(self, config: ModelConfig, vocabulary: int | Sequence[int]) -> None:
        super().__init__()
        self.config = config
        source, target = (vocabulary, vocabulary) if isinstance(vocabulary, int) else vocabulary
        self.target_embedding = nn.Parameter(torch.empty(target, config.dim))
        if config.tied != "all":
            self.source_embedding = nn.Parameter(torch.empty(source, config.dim))
        if config.tied == "none":
            self.output_embedding = nn.Parameter(torch.empty(target, config.dim))
        self.output_bias = nn.Parameter(torch.empty(target)) if config.output_bias else None
        encoder = [EncoderLayer(config) for _ in range(config.encoder_layers)]
        decoder = [DecoderLayer(config) for _ in range(config.decoder_layers)]
        self.encoder: Sequence[EncoderLayer] = nn.ModuleList(encoder)  # type: ignore[assignment]
        self.decoder: Sequence[DecoderLayer] = nn.ModuleList(decoder)  # type: ignore[assignment]
        final = nn.LayerNorm if config.norm == "pre" else nn.Identity
        self.encoder_norm, self.decoder_norm = (final(config.dim, eps=config.layer_norm_epsilon) for _ in range(2))
        self._positions = torch.empty(0)
        # What computes a layer of each kind in training: its own method, or a compiled version of it that all layers share.
        self._trains: tuple[Any, Any] = (EncoderLayer.forward, DecoderLayer.forward)
        self._layers_in = torch.float32
        self._lookups: Tensor | None = None  # a view of the output layer's matrix, with its own gradient
        self._initialize()
        if config.lora_rank is not None:
            freeze(self)

    def _initialize(self) -> None:
        """Initialize matrices by Glorot (fused projections block by block), embeddings by N(0, 1/dim) and biases by zero."""
        if self.target_embedding.is_meta:  # without values
            return
        for name, parameter in self.named_parameters():
            if name.endswith("embedding"):
                nn.init.normal_(parameter, std=self.config.dim**-0.5)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                fused = 3 if "query_key_value" in name else 2 if "key_value" in name else 1
                for block in parameter.data.chunk(fused):
                    nn.init.xavier_uniform_(block)

    @property
    def source_matrix(self) -> Tensor:
        return self.target_embedding if self.config.tied == "all" else self.source_embedding

    @property
    def output_matrix(self) -> Tensor:
        return self.output_embedding if self.config.tied == "none" else self.target_embedding

    @property
    def target_lookups(self) -> Tensor:
        """The embeddings (vocabulary, dim) of the decoder's input; under Marian's conventions, that of BEGIN is zero."""
        if self.config.conventions != "marian":
            return self.target_embedding
        return self.target_embedding.index_fill(0, torch.tensor(BEGIN, device=self.target_embedding.device), 0.0)

    @property
    def prediction_bias(self) -> Tensor | None:
        """What is added to the logits (vocabulary,) except in training; Marian's conventions exclude PAD and BEGIN."""
        if self.config.conventions != "marian":
            return self.output_bias
        matrix = self.output_matrix
        bias = matrix.new_zeros(len(matrix)) if self.output_bias is None else self.output_bias
        return bias.index_fill(0, torch.tensor([PAD, BEGIN], device=matrix.device), _NEVER)

    def separate_lookups(self, gradient: Tensor) -> None:
        """From now on, add the gradients of lookups in the first parameter, the output layer's matrix, to `gradient`."""
        assert self.output_matrix is next(self.parameters()), "modes with late lookups need a tied embedding"
        self._lookups = self.output_matrix.detach().requires_grad_()
        self._lookups.grad = gradient

    def layer_matrices(self) -> dict[str, int]:
        """The names of the matrices of layers, each with the number of projections that it joins, one above the other."""
        found = {}
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2 and "." in name:  # embeddings belong to no layer
                joined = name.endswith(("query_key_value.weight", "key_value.weight"))
                found[name] = parameter.shape[0] // parameter.shape[1] if joined else 1
        return found

    def compute_layers_in(self, dtype: torch.dtype) -> list[nn.Parameter]:
        """From now on, compute everything in `dtype` but lookups of words and the softmax over them.

        Returns the parameters of the layers, the last ones of the model, which the caller must convert.
        """
        self._layers_in = dtype
        return [parameter for module in self.children() for parameter in module.parameters()]

    def compile_layers(self, compiled: Callable[[Any], Any]) -> None:
        """In training, call a compiled version of one encoder layer, and of one decoder layer, for all of them."""
        self._trains = compiled(EncoderLayer.forward), compiled(DecoderLayer.forward)

    def loss(self, batch: Batch) -> Tensor:
        """Return the training objective: the mean label-smoothed cross-entropy per target token, an fp32 scalar.

        With weights, each sentence's part of the sum is multiplied by its weight; the number of tokens is not. With links, the
        cross-entropy of the guided head is added, with its weight.
        """
        guided = self.config.guided_alignment
        watch: list[Tensor] | None = [] if batch.links is not None and guided.weight else None
        hidden, labels = self._hidden(batch, watch)
        weights = None if batch.weights is None else batch.weights[_sentence_of_pieces(batch)]
        smoothing = self.config.label_smoothing
        total = smoothed_cross_entropy(hidden, self.output_matrix, self.output_bias, labels, smoothing, weights)
        if watch and batch.links is not None and batch.link_shares is not None:
            total = total + guided.weight * guided_cross_entropy(watch[0], batch.links, batch.link_shares)
        return total / batch.target_tokens

    def cross_entropy(self, batch: Batch) -> Tensor:
        """Return the validation measure: the sum of -log p over target tokens without label smoothing, an fp32 scalar."""
        hidden, labels = self._hidden(batch)
        return cross_entropy(hidden, self.output_matrix, self.prediction_bias, labels)

    def log_probabilities(self, batch: Batch) -> Tensor:
        """Return log p of each sentence's target, END included (sentences,), fp32."""
        hidden, labels = self._hidden(batch)
        pieces = log_probabilities(hidden, self.output_matrix, self.prediction_bias, labels)
        return pieces.new_zeros(len(batch)).index_add_(0, _sentence_of_pieces(batch), pieces)

    @property
    def guided(self) -> bool:
        """Whether a head learns, or has learned, word alignments."""
        return self.config.guided_alignment.layer is not None

    def guided_attention(self, batch: Batch) -> Tensor:
        """Return how much the guided head attends to each source piece when it predicts each target piece, fp32.

        The result is (batch, target, source); END is a piece. Needs a guided head.
        """
        watch: list[Tensor] = []
        self.states(batch.source, batch.source_mask, batch.target_in, watch)
        return watch[0].exp()

    def states(self, source: Tensor, mask: Tensor | None, target: Tensor, watch: list[Tensor] | None = None) -> Tensor:
        """Return the decoder output (batch, target, dim) for the ids of both sides; arguments as for `encode` and `decode`.

        If pieces of languages come before the ids, the result and `watch` are without these.
        """
        source, mask = self._encoder_input(source, mask)
        if not self.config.languages:
            return self.decode(target, self.encode(source, mask), mask, watch)
        x = self.decode(F.pad(target, (1, 0), value=END), self.encode(source, mask), mask, watch)
        if watch:
            watch[-1] = watch[-1][:, 1:, 1:]
        return x[:, 1:]

    def _hidden(self, batch: Batch, watch: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Return the decoder output (target tokens, dim) and the labels (target tokens,) without padding."""
        x = self.states(batch.source, batch.source_mask, batch.target_in, watch)
        if batch.target_filled is None:
            return x.flatten(0, 1), batch.target_out.flatten()
        return x.flatten(0, 1)[batch.target_filled], batch.target_out.flatten()[batch.target_filled]

    def encode(self, source: Tensor, mask: Tensor | None) -> Tensor:
        """Encode ids (batch, source) to (batch, source, dim); `mask` (batch, 1, 1, source) is added to attention scores."""
        x = self._embed(source, self.source_matrix, 0, self.config.dropout_source_words)
        forward = self._trains[0] if self.training else EncoderLayer.forward
        for layer in self.encoder:
            x = forward(layer, x, mask)
        return self.encoder_norm(x)

    def decode(self, target: Tensor, memory: Tensor, mask: Tensor | None, watch: list[Tensor] | None = None) -> Tensor:
        """Decode ids (batch, target) to (batch, target, dim); each position attends to itself and to earlier positions.

        watch: the logarithms of the guided head's attention weights (batch, target, source), fp32, are appended to it.
        """
        x = self._embed(target, self.target_embedding, 0, self.config.dropout_target_words)
        forward = self._trains[1] if self.training else DecoderLayer.forward
        for number, layer in enumerate(self.decoder, 1):
            x = forward(layer, x, memory, mask, watch if number == self.config.guided_alignment.layer else None)
        return self.decoder_norm(x)

    def start(self, source: Tensor, mask: Tensor | None) -> DecoderState:
        """Return the decoder state before the first word for source ids (sentences, source)."""
        source, mask = self._encoder_input(source, mask)
        memory = self.encode(source, mask)
        return DecoderState([layer.cross.project_memory(memory) for layer in self.decoder], mask, [None] * len(self.decoder))

    def step(self, words: Tensor, state: DecoderState) -> Tensor:
        """Add one word id per hypothesis (sentences, beam) to `state`; return the next logits (sentences, beam, vocabulary)."""
        if self.config.languages and state.steps == 0:
            self._advance(torch.full_like(words, END), state)
        x = self._advance(words, state).to(self.output_matrix.dtype)
        return F.linear(x, self.output_matrix, self.prediction_bias)

    def _advance(self, words: Tensor, state: DecoderState) -> Tensor:
        """Add one word id per hypothesis (sentences, beam) to `state`; return the decoder output (sentences, beam, dim)."""
        sentences, beam = words.shape
        x = self._embed(words.view(-1, 1), self.target_embedding, state.steps, 0.0)
        for index, layer in enumerate(self.decoder):
            x = layer.attention_residual(x, lambda y, i=index, at=layer: self._extend(at, y, state, i))
            x = x.view(sentences, beam, -1)  # all hypotheses of a sentence query its memory in one batch
            x = layer.cross_residual(x, lambda y, i=index, at=layer: at.cross(y, state.memory[i], state.mask))
            x = layer.ffn_residual(x, layer.ffn).view(sentences * beam, 1, -1)
        state.steps += 1
        return self.decoder_norm(x).view(sentences, beam, -1)

    def _encoder_input(self, source: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The ids with the piece of their language, if the model has such pieces, and the mask of these, as layers need it."""
        mask = None if mask is None else mask.to(self._layers_in)
        if not self.config.languages:
            return source, mask
        return F.pad(source, (1, 0), value=LANGUAGE), None if mask is None else F.pad(mask, (1, 0))

    @staticmethod
    def _extend(layer: DecoderLayer, x: Tensor, state: DecoderState, index: int) -> Tensor:
        x, state.past[index] = layer.attention.extend(x, state.past[index])
        return x

    def _embed(self, ids: Tensor, matrix: Tensor, first: int, drop: float) -> Tensor:
        if self._lookups is not None and matrix is self.output_matrix:
            matrix = self._lookups
        x = F.embedding(ids, matrix) * math.sqrt(self.config.dim)
        if self.config.conventions == "marian":
            x = x.masked_fill((ids == BEGIN)[..., None], 0.0)
        x = drop_words(x, drop, self.training)
        x = x + self.position_table(first + ids.shape[1], x.device)[first:]
        return dropout(x.to(self._layers_in), self.config.dropout, self.training)

    def position_table(self, length: int, device: torch.device) -> Tensor:
        """Return the first `sinusoids` (length, dim); extend the table if a sentence is longer than it."""
        if len(self._positions) < length or self._positions.device != device:
            size = max(256, 1 << (length - 1).bit_length())
            with torch.inference_mode(False):  # validation may create this table, and training uses it later
                self._positions = sinusoids(size, self.config.dim, self.config.conventions).to(device)
        return self._positions[:length]


def _sentence_of_pieces(batch: Batch) -> Tensor:
    """The number of the sentence that each target piece belongs to (target tokens,)."""
    return (batch.target_out != PAD).nonzero()[:, 0]
