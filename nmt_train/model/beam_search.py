"""Batched beam search: the result for a sentence does not depend on the other sentences of its batch.

The search follows Huang, Zhao and Ma (2017, "When to finish?", section 3): it ends when no open hypothesis can still become
better than those that have ended. One of the hypotheses is always that of greedy search, so a beam never gives a worse one.
"""

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

    beam: the number of open hypotheses per sentence; 1: greedy search. n_best: how many of the best translations are wanted.
    normalization: log-probabilities are divided by length^normalization. A translation has at most
    length_factor * source length + length_extra pieces, including END.
    """

    beam: int = 5
    normalization: float = 1.0
    length_factor: float = 2.0
    length_extra: int = 10
    n_best: int = 1

    def limit(self, source: int) -> int:
        """Return the maximum length of a translation of `source` pieces; both lengths include END."""
        return int(self.length_factor * source) + self.length_extra


@dataclass(frozen=True)
class Hypothesis:
    """Piece ids without BEGIN and END; `log_probability` is the sum over them and END, `score` the length-normalized sum.

    ended: False if it was broken off at the maximum length, without END.
    """

    ids: list[int]
    log_probability: float
    score: float
    ended: bool = True


@torch.inference_mode()
def search(model: Transformer | Ensemble, source: Tensor, mask: Tensor | None, config: SearchConfig) -> list[list[Hypothesis]]:
    """Return the `n_best` best translations of each sentence of `source` (sentences, length), best first.

    A hypothesis has ended if END is among the `beam` best candidates of its sentence, or the best extension of the greedy
    hypothesis. A sentence is finished when `n_best` hypotheses have ended and no open one can become better, even if all of
    its further pieces up to the maximum length were certain. At that length, open hypotheses are broken off; the best of them
    is the only result if none has ended. A sentence has no translation if the model's logits are not finite.
    mask: (sentences, 1, 1, length), or None.
    """
    beam, device = config.beam, source.device
    limits = torch.tensor([config.limit(int(n)) for n in (source != PAD).sum(1)], device=device)
    longest = limits.float() ** config.normalization  # divides the log-probability in the best case
    state: Any = model.start(source, mask)
    sentences = torch.arange(len(source), device=device)  # the sentences that are not finished
    words = torch.full((len(source), beam), BEGIN, device=device)
    scores = torch.full((len(source), beam), -math.inf, device=device)
    scores[:, 0] = 0.0  # start from one hypothesis; otherwise all would be equal
    greedy = torch.zeros(len(source), dtype=torch.long, device=device)  # row of the greedy hypothesis; -1: it has ended
    history = words.new_empty(len(source), beam, 0)
    results: list[list[Hypothesis]] = [[] for _ in range(len(source))]
    while len(sentences):
        length = history.shape[2] + 1
        candidates, parents, pieces, of_greedy = _extend(model.step(words, state), scores, greedy)
        ended = pieces == END
        ranks = torch.arange(candidates.shape[1], device=device)
        ends = ended & candidates.isfinite() & ((ranks < beam) | (ranks == of_greedy[:, None]))
        for row, rank in ends.nonzero().tolist():
            total = float(candidates[row, rank])
            ids = history[row, parents[row, rank]].tolist()
            hypothesis = Hypothesis(ids, total, total / length**config.normalization)
            _keep_best(results[int(sentences[row])], hypothesis, config.n_best)
        at_limit = limits[sentences] <= length
        for row in (at_limit & candidates[:, 0].isfinite()).nonzero().flatten().tolist():
            if not results[int(sentences[row])]:
                total, before = float(scores[row, 0]), max(1, length - 1)
                broken_off = Hypothesis(history[row, 0].tolist(), total, total / before**config.normalization, ended=False)
                results[int(sentences[row])].append(broken_off)
        scores, places = candidates.masked_fill(ended, -math.inf).topk(beam, dim=1)
        greedy = _keep_greedy(scores, places, candidates, ended, of_greedy)
        parents, words = parents.gather(1, places), pieces.gather(1, places)
        worst = [results[s][-1].score if len(results[s]) >= config.n_best else -math.inf for s in sentences.tolist()]
        alive = scores[:, 0].isfinite() & ~at_limit & (scores[:, 0] / longest[sentences] > scores.new_tensor(worst))
        if beam == 1:
            alive &= greedy >= 0
        kept = alive.nonzero().flatten()
        history = torch.cat([history.gather(1, parents[..., None].expand_as(history)), words[..., None]], dim=2)[kept]
        rows = (kept[:, None] * beam + parents[kept]).flatten()
        state.select(None if len(kept) == len(alive) else kept, rows)
        sentences, words, scores, greedy = sentences[kept], words[kept], scores[kept], greedy[kept]
    return results


def _keep_best(best: list[Hypothesis], hypothesis: Hypothesis, count: int) -> None:
    """Insert a hypothesis into a list of at most `count`, best first; of equal ones, the earlier one comes first."""
    best.append(hypothesis)
    best.sort(key=lambda other: -other.score)
    del best[count:]


def _extend(logits: Tensor, scores: Tensor, greedy: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the 2 * beam best extensions of each sentence's hypotheses, best first, then the best one of the greedy one.

    The results are (totals, parents, pieces), each (sentences, 2 * beam + 1), and the place of the greedy extension in them
    (sentences,); the last total is -inf if it stands elsewhere, too. At most `beam` extensions end (one per hypothesis), so at
    least `beam` others remain. logits (sentences, beam, vocabulary); scores (sentences, beam); greedy (sentences,).
    """
    beam, vocabulary = logits.shape[1:]
    totals = torch.log_softmax(logits.float(), dim=-1) + scores[..., None]
    totals[..., [PAD, UNKNOWN, BEGIN]] = -math.inf
    width = min(2 * beam, vocabulary)
    best, pieces = totals.topk(width, dim=2)  # select per hypothesis first: many short sorts run in parallel
    candidates, places = best.flatten(1).topk(min(2 * beam, width * beam), dim=1)
    parents, chosen = places // width, pieces.flatten(1).gather(1, places)
    row = greedy.clamp_min(0)[:, None]
    total, piece = best[..., 0].gather(1, row), pieces[..., 0].gather(1, row)
    same = (parents == row) & (chosen == piece)
    known = same.any(1, keepdim=True)
    total = total.masked_fill(known | (greedy < 0)[:, None], -math.inf)
    place = torch.where(known.squeeze(1), same.int().argmax(1), candidates.shape[1])
    place = place.masked_fill(greedy < 0, -1)
    return (*(torch.cat(pair, dim=1) for pair in ((candidates, total), (parents, row), (chosen, piece))), place)  # type: ignore[return-value]


def _keep_greedy(scores: Tensor, places: Tensor, candidates: Tensor, ended: Tensor, of_greedy: Tensor) -> Tensor:
    """Put the greedy extension in place of the worst selected one if it is not selected; returns its row, -1 if it has ended.

    scores, places (sentences, beam): of the selected extensions, changed in place; the others as in `search`.
    """
    place = of_greedy.clamp_min(0)[:, None]
    is_open = (of_greedy[:, None] >= 0) & ~ended.gather(1, place)
    missing = (is_open & ~(places == place).any(1, keepdim=True)).squeeze(1)
    scores[missing, -1] = candidates.gather(1, place)[missing, 0]
    places[missing, -1] = place[missing, 0]
    return torch.where(is_open.squeeze(1), (places == place).int().argmax(1), -1)
