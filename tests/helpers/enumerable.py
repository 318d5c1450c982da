"""A model whose probabilities after each prefix are given, or drawn at random: small enough to enumerate."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from nmt_train.corpus.vocabulary import END

VOCABULARY = 7
WORDS = [4, 5, 6]


class Table(torch.nn.Module):
    """A model whose probabilities after each prefix are given, or drawn at random: small enough to enumerate."""

    def __init__(self, seed: int = 0, given: dict[tuple[int, ...], dict[int, float]] | None = None) -> None:
        super().__init__()
        self._seed, self._given = seed, given

    def logits(self, prefix: tuple[int, ...]) -> np.ndarray:
        if self._given is None:
            return 3 * np.random.default_rng([self._seed, *prefix]).standard_normal(VOCABULARY)
        logs = np.full(VOCABULARY, -30.0)
        for piece, probability in self._given.get(prefix, {END: 1.0}).items():
            logs[piece] = math.log(probability)
        return logs

    def log_probability(self, words: tuple[int, ...]) -> float:
        whole = (*words, END)
        logs = [torch.log_softmax(torch.tensor(self.logits(whole[:n])).float(), 0)[piece] for n, piece in enumerate(whole)]
        return float(sum(logs))

    def start(self, source: torch.Tensor, mask: torch.Tensor | None) -> Prefixes:
        return Prefixes([[()] for _ in source])

    def step(self, words: torch.Tensor, state: Prefixes) -> torch.Tensor:
        if state.begun:
            state.rows = [
                [(*prefix, int(word)) for prefix, word in zip(row, chosen, strict=True)]
                for row, chosen in zip(state.rows, words, strict=True)
            ]
        else:
            state.rows, state.begun = [row * words.shape[1] for row in state.rows], True
        return torch.tensor(np.array([[self.logits(prefix) for prefix in row] for row in state.rows]))


@dataclass
class Prefixes:
    rows: list[list[tuple[int, ...]]]
    begun: bool = False

    def select(self, sentences: torch.Tensor | None, hypotheses: torch.Tensor) -> None:
        beam = len(self.rows[0])
        flat = [prefix for row in self.rows for prefix in row]
        chosen = [flat[int(place)] for place in hypotheses]
        self.rows = [chosen[start : start + beam] for start in range(0, len(chosen), beam)]
