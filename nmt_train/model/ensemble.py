"""An ensemble: the probability of each piece is the mean of the probabilities that the models give it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nmt_train.corpus.batch import Batch
from nmt_train.model.transformer import DecoderState, Transformer


@dataclass
class EnsembleState:
    """The decoder states of all models."""

    states: list[DecoderState]

    def select(self, sentences: Tensor | None, hypotheses: Tensor) -> None:
        """See `DecoderState.select`."""
        for state in self.states:
            state.select(sentences, hypotheses)


class Ensemble(nn.Module):
    """Has the methods of `Transformer` that beam search needs; the models must have the same vocabulary."""

    def __init__(self, models: Sequence[Transformer]) -> None:
        super().__init__()
        self._models: Sequence[Transformer] = nn.ModuleList(models)  # type: ignore[assignment]

    def start(self, source: Tensor, mask: Tensor | None) -> EnsembleState:
        return EnsembleState([model.start(source, mask) for model in self._models])

    @property
    def guided(self) -> bool:
        """Whether all models have a guided head."""
        return all(model.guided for model in self._models)

    def guided_attention(self, batch: Batch) -> Tensor:
        """The mean of `Transformer.guided_attention`."""
        return torch.stack([model.guided_attention(batch) for model in self._models]).mean(0)

    def step(self, words: Tensor, state: EnsembleState) -> Tensor:
        """Like `Transformer.step`; returns log-probabilities (sentences, beam, vocabulary), which can be used as logits."""
        found = [
            torch.log_softmax(model.step(words, own).float(), dim=-1)
            for model, own in zip(self._models, state.states, strict=True)
        ]
        return torch.logsumexp(torch.stack(found), dim=0) - math.log(len(found))
