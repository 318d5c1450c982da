"""Translations drawn at random from the most probable pieces, instead of searched for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nmt_train.corpus.vocabulary import END
from nmt_train.model.beam_search import Decoding, Hypothesis, SearchConfig
from nmt_train.model.demand import Demands
from nmt_train.model.ensemble import Ensemble
from nmt_train.model.transformer import Transformer


@dataclass(frozen=True)
class Sampling:
    """Which pieces may be drawn at each step, with their probabilities.

    top_k: this number of the most probable ones (Fan et al. 2018), or None. nucleus: the fewest most probable ones that have at
    least this probability together (Holtzman et al. 2020). seed: with the number of a line, it decides what is drawn.
    """

    top_k: int | None = None
    nucleus: float = 1.0
    seed: int = 1

    def uniform(self, number: int, samples: int, steps: int) -> np.ndarray:
        """The random numbers from 0 to 1 for source `number`: (samples, steps), the first ones the same for any sizes."""
        rows = [np.random.default_rng([self.seed, number, sample]).random(steps) for sample in range(samples)]
        return np.array(rows, dtype=np.float32)

    def choose(self, logs: Tensor, uniform: Tensor) -> Tensor:
        """The pieces at these quantiles of the distributions that may be drawn from; both arguments' shapes as the result's.

        logs: log-probabilities (..., vocabulary). uniform: (...). Return ids (...).
        """
        count = min(self.top_k or logs.shape[-1], logs.shape[-1])
        values, pieces = torch.softmax(logs, dim=-1).topk(count, dim=-1)
        values = values * (values.cumsum(-1) - values < self.nucleus)
        sums = values.cumsum(-1)
        last = (values > 0).sum(-1) - 1
        places = (sums <= uniform[..., None] * sums[..., -1:]).sum(-1).minimum(last).clamp(min=0)
        return pieces.gather(-1, places[..., None])[..., 0]


@torch.inference_mode()
def sample(
    model: Transformer | Ensemble, source: Tensor, mask: Tensor | None, config: SearchConfig, sampling: Sampling,
    numbers: Sequence[int], demands: Demands | None = None,
) -> list[list[Hypothesis]]:  # fmt: skip
    """Draw `n_best` translations of each sentence of `source` (sentences, length), independently; return them best first.

    numbers: one per sentence; the same number draws the same translations, whatever the batch. demands: without terms.
    Other arguments, and what broken-off translations and missing ones mean, as for `beam_search.search`.
    """
    results = _Draw(model, source, mask, config, sampling, numbers, demands).run().results
    return [sorted(found, key=lambda each: (not each.ended, -each.score)) for found in results]


class _Draw(Decoding):
    """`_opened`: the samples that have not ended. `_totals`: their log-probabilities; both (sentences, samples)."""

    def __init__(
        self, model: Transformer | Ensemble, source: Tensor, mask: Tensor | None, config: SearchConfig, sampling: Sampling,
        numbers: Sequence[int], demands: Demands | None,
    ) -> None:  # fmt: skip
        samples = config.n_best
        super().__init__(model, source, mask, config, samples, demands, terms=False)
        drawn = [sampling.uniform(number, samples, int(self._limits.max())) for number in numbers]
        self._sampling, self._uniform = sampling, torch.from_numpy(np.array(drawn)).to(source.device)
        self._totals = torch.zeros(self._words.shape, device=source.device)
        self._opened = torch.ones_like(self._words, dtype=torch.bool)

    def _step(self, logs: Tensor) -> None:
        before, length = self._totals, self._history.shape[2]
        words = self._sampling.choose(logs, self._uniform[self._sentences, :, length])
        totals = before + logs.gather(2, words[..., None])[..., 0]
        ended, at_limit = words == END, self._at_limit()[:, None]
        for row, column in (self._opened & totals.isfinite() & (ended | at_limit)).nonzero().tolist():
            whole = bool(ended[row, column])
            total = float((totals if whole else before)[row, column])
            score = total / max(1, length + whole) ** self._config.normalization
            hypothesis = Hypothesis(self._history[row, column].tolist(), total, score, whole)
            self.results[int(self._sentences[row])].append(hypothesis)
        opened = self._opened & ~(ended | at_limit)
        kept = opened.any(1).nonzero().flatten()
        self._totals, self._opened = totals[kept], opened[kept]
        self._keep(kept, words)
