"""Batched beam search: the result for a sentence does not depend on the other sentences of its batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nmt_train.corpus.vocabulary import BEGIN, END, PAD, UNKNOWN
from nmt_train.model.ensemble import Ensemble
from nmt_train.model.transformer import Transformer


@dataclass(frozen=True)
class SearchConfig:
    """Settings of the search.

    beam: the number of hypotheses per sentence. normalization: log-probabilities are divided by length^normalization.
    A translation has at most length_factor * source length + length_extra pieces, including END.
    """

    beam: int = 5
    normalization: float = 1.0
    length_factor: float = 2.0
    length_extra: int = 10

    def limit(self, source: int) -> int:
        """Return the maximum length of a translation of `source` pieces; both lengths include END."""
        return int(self.length_factor * source) + self.length_extra


@dataclass(frozen=True)
class Hypothesis:
    """Piece ids without BEGIN and END; `log_probability` is the sum over them and END, `score` the length-normalized sum."""

    ids: list[int]
    log_probability: float
    score: float


@torch.inference_mode()
def search(model: Transformer | Ensemble, source: Tensor, mask: Tensor | None, config: SearchConfig) -> list[list[Hypothesis]]:
    """Return the best translations of each sentence of `source` (sentences, length), best first, at most `beam` each.

    A hypothesis is finished if it ends in END and is among the `beam` best candidates of its sentence. A sentence is finished
    if it has `beam` finished hypotheses or reaches its maximum length, where only END may follow. It has no translation if the
    model's logits are not finite. mask: (sentences, 1, 1, length), or None.
    """
    beam = config.beam
    limits = torch.tensor([config.limit(int(n)) for n in (source != PAD).sum(1)], device=source.device)
    state: Any = model.start(source, mask)
    sentences = torch.arange(len(source), device=source.device)  # the sentences that are not finished
    words = torch.full((len(source), beam), BEGIN, device=source.device)
    scores = torch.full((len(source), beam), -math.inf, device=source.device)
    scores[:, 0] = 0.0  # start from one hypothesis; otherwise all would be equal
    history = words.new_empty(len(source), beam, 0)
    finished: list[list[Hypothesis]] = [[] for _ in range(len(source))]
    while len(sentences):
        length = history.shape[2] + 1
        candidates, parents, pieces = _extend(model.step(words, state), scores, length >= limits[sentences])
        ended = pieces == END
        for row, rank in (ended[:, :beam] & candidates[:, :beam].isfinite()).nonzero().tolist():
            done = finished[int(sentences[row])]
            if len(done) < beam:
                total = float(candidates[row, rank])
                ids = history[row, parents[row, rank]].tolist()
                done.append(Hypothesis(ids, total, total / length**config.normalization))
        scores, places = candidates.masked_fill(ended, -math.inf).topk(beam, dim=1)
        parents, words = parents.gather(1, places), pieces.gather(1, places)
        alive = torch.tensor([len(finished[s]) < beam for s in sentences.tolist()], device=source.device)
        alive &= scores[:, 0].isfinite()
        kept = alive.nonzero().flatten()
        history = torch.cat([history.gather(1, parents[..., None].expand_as(history)), words[..., None]], dim=2)[kept]
        rows = (kept[:, None] * beam + parents[kept]).flatten()
        state.select(None if len(kept) == len(alive) else kept, rows)
        sentences, words, scores = sentences[kept], words[kept], scores[kept]
    return [sorted(done, key=lambda hypothesis: -hypothesis.score) for done in finished]


def _extend(logits: Tensor, scores: Tensor, at_limit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the 2 * beam best extensions of each sentence's hypotheses, best first: (totals, parents, pieces).

    All three are (sentences, 2 * beam). At most `beam` extensions end (one per hypothesis), so at least `beam` others remain.
    logits (sentences, beam, vocabulary); scores (sentences, beam); at_limit (sentences,): only END may follow.
    """
    beam, vocabulary = logits.shape[1:]
    logits = logits.float()
    totals = torch.log_softmax(logits, dim=-1) + scores[..., None]
    totals[..., [PAD, UNKNOWN, BEGIN]] = -math.inf
    if at_limit.any():
        ends = totals[at_limit][..., END].clone()
        totals[at_limit] = -math.inf
        totals[at_limit, :, END] = ends
    width = min(2 * beam, vocabulary)
    best, pieces = totals.topk(width, dim=2)  # select per hypothesis first: many short sorts run in parallel
    candidates, places = best.flatten(1).topk(min(2 * beam, width * beam), dim=1)
    return candidates, places // width, pieces.flatten(1).gather(1, places)
