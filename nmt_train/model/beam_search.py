"""Batched beam search: the result for a sentence does not depend on the other sentences of its batch.

The search follows Huang, Zhao and Ma (2017, "When to finish?", section 3): it ends when no open hypothesis can still become
better than those that have ended. If the beam loses the hypothesis of greedy search, greedy search follows, so that a beam is
never worse.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
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

    A hypothesis has ended if END is among the `beam` best candidates of its sentence. A sentence is finished when `n_best`
    hypotheses have ended and no open one can become better, even if all of its further pieces up to the maximum length were
    certain. At that length, open hypotheses are broken off; the best of them is the only result if none has ended. The result
    of greedy search counts, too. A sentence has no translation if the model's logits are not finite.
    mask: (sentences, 1, 1, length), or None.
    """
    results, lost = _search(model, source, mask, config)
    if lost:
        alone = None if mask is None else mask[lost]
        found, _ = _search(model, source[lost], alone, replace(config, beam=1, n_best=1))
        for row, hypotheses in zip(lost, found, strict=True):
            for hypothesis in hypotheses:
                _add(results[row], hypothesis, config.n_best)
    return results


def _search(
    model: Transformer | Ensemble, source: Tensor, mask: Tensor | None, config: SearchConfig
) -> tuple[list[list[Hypothesis]], list[int]]:
    """The results of the beam; and the sentences where it lost the greedy hypothesis, which can still become better."""
    beam, device = config.beam, source.device
    limits = torch.tensor([config.limit(int(n)) for n in (source != PAD).sum(1).tolist()], device=device)
    longest = limits.float() ** config.normalization  # divides the log-probability in the best case
    state: Any = model.start(source, mask)
    sentences = torch.arange(len(source), device=device)  # the sentences that are not finished
    words = torch.full((len(source), beam), BEGIN, device=device)
    scores = torch.full((len(source), beam), -math.inf, device=device)
    scores[:, 0] = 0.0  # start from one hypothesis; otherwise all would be equal
    greedy = torch.zeros(len(source), dtype=torch.long, device=device)  # row of the greedy hypothesis; -1: it ended or is lost
    history = words.new_empty(len(source), beam, 0)
    results: list[list[Hypothesis]] = [[] for _ in range(len(source))]
    worst = torch.full((len(source),), -math.inf, device=device)  # the score that a further result must exceed
    lost: dict[int, float] = {}  # the best score that a lost greedy hypothesis could have
    while len(sentences):
        length = history.shape[2] + 1
        candidates, parents, pieces, of_greedy = _extend(model.step(words, state), scores, greedy)
        ended, possible = pieces == END, scores / longest[sentences, None]
        final = (candidates / length**config.normalization).masked_fill(~ended, -math.inf)[:, :beam]
        for row, rank in (final > worst[:, None]).nonzero().tolist():
            ids, found = history[row, parents[row, rank]].tolist(), results[int(sentences[row])]
            _add(found, Hypothesis(ids, float(candidates[row, rank]), float(final[row, rank])), config.n_best)
            worst[row] = found[-1].score if len(found) == config.n_best else -math.inf
        at_limit = limits[sentences] <= length
        for row in (at_limit & candidates[:, 0].isfinite()).nonzero().flatten().tolist():
            total, before = float(scores[row, 0]), max(1, length - 1)
            broken_off = Hypothesis(history[row, 0].tolist(), total, total / before**config.normalization, ended=False)
            _add(results[int(sentences[row])], broken_off, config.n_best)
        scores, places = candidates.masked_fill(ended, -math.inf).topk(beam, dim=1)
        following = _row_of(of_greedy, places)
        has_ended = ended[:, :beam].gather(1, of_greedy.clamp(0, beam - 1)[:, None]).squeeze(1)
        has_ended &= (of_greedy >= 0) & (of_greedy < beam)
        for row in ((greedy >= 0) & (following < 0) & ~has_ended).nonzero().flatten().tolist():
            lost[int(sentences[row])] = float(possible[row, greedy[row]])
        parents, words = parents.gather(1, places), pieces.gather(1, places)
        alive = scores[:, 0].isfinite() & ~at_limit & (scores[:, 0] / longest[sentences] > worst)
        if beam == 1:
            alive &= following >= 0
        kept = alive.nonzero().flatten()
        history = torch.cat([history.gather(1, parents[..., None].expand_as(history)), words[..., None]], dim=2)[kept]
        rows = (kept[:, None] * beam + parents[kept]).flatten()
        state.select(None if len(kept) == len(alive) else kept, rows)
        sentences, words, scores, greedy, worst = sentences[kept], words[kept], scores[kept], following[kept], worst[kept]
    full = [len(found) == config.n_best and found[-1].ended for found in results]
    return results, [row for row, best in lost.items() if not full[row] or best > results[row][-1].score]


def _add(best: list[Hypothesis], hypothesis: Hypothesis, count: int) -> None:
    """Insert a hypothesis into a list of at most `count`, best first; a broken-off one is kept only if none has ended."""
    if any((other.ids, other.ended) == (hypothesis.ids, hypothesis.ended) for other in best) or (
        best and best[0].ended and not hypothesis.ended
    ):
        return
    if best and hypothesis.ended and not best[0].ended:
        best.clear()
    best.append(hypothesis)
    best.sort(key=lambda other: -other.score)
    del best[count if hypothesis.ended else 1 :]


def _extend(logits: Tensor, scores: Tensor, greedy: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the 2 * beam best extensions of each sentence's hypotheses, best first.

    The results are (totals, parents, pieces), each (sentences, 2 * beam), and the place of the greedy hypothesis' best
    extension among them (sentences,), -1 if there is none. At most `beam` extensions end (one per hypothesis), so at least
    `beam` others remain. logits (sentences, beam, vocabulary); scores (sentences, beam); greedy (sentences,).
    """
    beam, vocabulary = logits.shape[1:]
    log_probabilities = torch.log_softmax(logits.float(), dim=-1)
    log_probabilities[..., [PAD, UNKNOWN, BEGIN]] = -math.inf
    width = min(2 * beam, vocabulary)
    best, pieces = log_probabilities.topk(width, dim=2)  # per hypothesis first: many short sorts run in parallel
    candidates, places = (best + scores[..., None]).flatten(1).topk(min(2 * beam, width * beam), dim=1)
    of_greedy = _row_of(torch.where(greedy >= 0, greedy * width, -1), places)
    return candidates, places // width, pieces.flatten(1).gather(1, places), of_greedy


def _row_of(place: Tensor, places: Tensor) -> Tensor:
    """Where `place` (sentences,) stands in `places` (sentences, n); -1 if it is missing, or negative."""
    same = (places == place[:, None]) & (place >= 0)[:, None]
    return torch.where(same.any(1), same.int().argmax(1), -1)
