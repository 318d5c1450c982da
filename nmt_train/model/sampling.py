"""Translations drawn at random from the most probable pieces, instead of searched for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nmt_train.corpus.vocabulary import BEGIN, END, PAD
from nmt_train.model.beam_search import Hypothesis, SearchConfig
from nmt_train.model.demand import Demands, permitted
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
    samples, device = config.n_best, source.device
    least = [0] * len(source) if demands is None else demands.lengths(terms=False)
    limits = torch.tensor(list(map(config.limit, (source != PAD).sum(1).tolist(), least)), device=device)
    drawn = [sampling.uniform(number, samples, int(limits.max())) for number in numbers]
    uniform = torch.from_numpy(np.array(drawn)).to(device)
    state: Any = model.start(source, mask)
    sentences = torch.arange(len(source), device=device)  # those with open samples
    words = torch.full((len(source), samples), BEGIN, device=device)
    totals, history = torch.zeros(words.shape, device=device), words.new_empty(*words.shape, 0)
    opened = torch.ones_like(words, dtype=torch.bool)
    results: list[list[Hypothesis]] = [[] for _ in range(len(source))]
    while len(sentences):
        length = history.shape[2] + 1
        logs = permitted(model.step(words, state), history, demands)
        words = sampling.choose(logs, uniform[sentences, :, length - 1])
        before, totals = totals, totals + logs.gather(2, words[..., None])[..., 0]
        ended, at_limit = words == END, (limits[sentences] == length)[:, None]
        for row, column in (opened & totals.isfinite() & (ended | at_limit)).nonzero().tolist():
            whole = bool(ended[row, column])
            total = float((totals if whole else before)[row, column])
            score = total / max(1, length if whole else length - 1) ** config.normalization
            results[int(sentences[row])].append(Hypothesis(history[row, column].tolist(), total, score, whole))
        opened &= ~(ended | at_limit)
        kept = opened.any(1).nonzero().flatten()
        history = torch.cat([history, words[..., None]], dim=2)[kept]
        if 0 < len(kept) < len(sentences):
            state.select(kept, (kept[:, None] * samples + torch.arange(samples, device=device)).flatten())
            demands = None if demands is None else demands.pick(kept.tolist())
        sentences, words, totals, opened = sentences[kept], words[kept], totals[kept], opened[kept]
    return [sorted(found, key=lambda each: (not each.ended, -each.score)) for found in results]
