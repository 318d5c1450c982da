"""Batched beam search: the result for a sentence does not depend on the other sentences of its batch.

The search follows Huang, Zhao and Ma (2017, "When to finish?", section 3): it ends when no open hypothesis can still become
better than those that have ended. If the beam loses the hypothesis of greedy search, greedy search follows, so that a beam is
never worse.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from nmt_train.corpus.vocabulary import BEGIN, END, PAD
from nmt_train.model.demand import Demands, permitted
from nmt_train.model.ensemble import Ensemble
from nmt_train.model.term_progress import TermProgress, first_open
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

    def limit(self, source: int, demanded: int = 0) -> int:
        """Return the maximum length of a translation of `source` pieces with `demanded` ones; both lengths include END."""
        return max(int(self.length_factor * source), demanded) + self.length_extra


@dataclass(frozen=True)
class Hypothesis:
    """Piece ids without BEGIN and END; `log_probability` is the sum over them and END, `score` the length-normalized sum.

    ended: False if it was broken off at the maximum length, without END. alignment: soft, as of `Aligner`, if it is wanted.
    """

    ids: list[int]
    log_probability: float
    score: float
    ended: bool = True
    alignment: np.ndarray | None = field(default=None, compare=False)


@torch.inference_mode()
def search(
    model: Transformer | Ensemble, source: Tensor, mask: Tensor | None, config: SearchConfig, demands: Demands | None = None
) -> list[list[Hypothesis]]:
    """Return the `n_best` best translations of each sentence of `source` (sentences, length), best first.

    A hypothesis has ended if END is among the `beam` best candidates of its sentence. A sentence is finished when `n_best`
    hypotheses have ended and no open one can become better, even if all of its further pieces up to the maximum length were
    certain. At that length, open hypotheses are broken off; the best of them are the results if none has ended. The result of
    greedy search counts, too. A sentence has no translation if the model's logits are not finite.
    mask: (sentences, 1, 1, length), or None. demands: what each translation must have. A sentence whose translations have its
    terms anyway keeps them; otherwise it is searched again, with a beam that is larger by the pieces of its terms. A
    translation lacks a term only if it was broken off.
    """
    results = _beam_and_greedy(model, source, mask, config, demands)
    if demands is None:
        return results
    lacking: dict[int, list[int]] = {}  # by the size of their beam
    for row, demand in enumerate(demands.each):
        if not all(demand.has_terms(hypothesis.ids, demands.kinds) for hypothesis in results[row]):
            lacking.setdefault(config.beam + demand.term_pieces, []).append(row)
    for beam, rows in lacking.items():
        own = demands.pick(rows)
        again = _Search(model, *_part(source, mask, rows), replace(config, beam=beam), own, TermProgress(own, beam)).run()
        for row, found in zip(rows, again.results, strict=True):
            for hypothesis in results[row]:
                if hypothesis.ended and demands.each[row].has_terms(hypothesis.ids, demands.kinds):
                    _add(found, hypothesis, config.n_best)
            results[row] = found
    return results


def _beam_and_greedy(
    model: Transformer | Ensemble, source: Tensor, mask: Tensor | None, config: SearchConfig, demands: Demands | None
) -> list[list[Hypothesis]]:
    """The better results of beam search and of greedy search, without terms."""
    first = _Search(model, source, mask, config, demands).run()
    results, lost = first.results, first.lost
    if lost:
        own = None if demands is None else demands.pick(lost)
        greedy = _Search(model, *_part(source, mask, lost), replace(config, beam=1, n_best=1), own).run()
        for row, hypotheses in zip(lost, greedy.results, strict=True):
            for hypothesis in hypotheses:
                _add(results[row], hypothesis, config.n_best)
    return results


def _part(source: Tensor, mask: Tensor | None, rows: list[int]) -> tuple[Tensor, Tensor | None]:
    return source[rows], None if mask is None else mask[rows]


class Decoding:
    """Translates a batch, a piece at a time: what beam search and sampling share. results: the n-best lists.

    Tensors have a row for each sentence that is not finished: `_sentences` has its number, and `_history` the pieces of its
    hypotheses (sentences, width, length).
    """

    def __init__(
        self, model: Transformer | Ensemble, source: Tensor, mask: Tensor | None, config: SearchConfig, width: int,
        demands: Demands | None, terms: bool,
    ) -> None:  # fmt: skip
        """width: the number of hypotheses per sentence. terms: whether translations get longer by those of `demands`."""
        device, count = source.device, len(source)
        self._model, self._config, self._demands = model, config, demands
        demanded = [0] * count if demands is None else demands.lengths(terms)
        lengths = (source != PAD).sum(1).tolist()
        self._limits = torch.tensor([*map(config.limit, lengths, demanded)], device=device)
        self._state: Any = model.start(source, mask)
        self._sentences = torch.arange(count, device=device)
        self._words = torch.full((count, width), BEGIN, device=device)
        self._history = self._words.new_empty(count, width, 0)
        self.results: list[list[Hypothesis]] = [[] for _ in range(count)]

    def run(self) -> Self:
        while len(self._sentences):
            self._step(permitted(self._model.step(self._words, self._state), self._history, self._demands))
        return self

    def _step(self, logs: Tensor) -> None:
        """Add a piece to all hypotheses, and to `results` those that end with it; then `_keep` the others.

        logs: its log-probabilities (sentences, width, vocabulary).
        """
        raise NotImplementedError

    def _at_limit(self) -> Tensor:
        """Whether the next piece is the last one that the translation of each sentence may have; bool (sentences,)."""
        return self._limits[self._sentences] <= self._history.shape[2] + 1

    def _keep(self, kept: Tensor, words: Tensor, parents: Tensor | None = None) -> None:
        """Continue with some sentences. Their hypotheses are those at `parents`, or all of them, with a further word.

        kept: their rows. words, parents: (sentences, width), of all sentences.
        """
        history, all_kept = self._history, len(kept) == len(words)
        if parents is not None:
            history = history.gather(1, parents[..., None].expand_as(history))
        self._history = torch.cat([history, words[..., None]], dim=2)[kept]
        if self._demands is not None and 0 < len(kept) < len(words):
            self._demands = self._demands.pick(kept.tolist())
        if parents is not None or not all_kept:
            places = torch.arange(words.shape[1], device=words.device).expand_as(words) if parents is None else parents
            self._state.select(None if all_kept else kept, (kept[:, None] * words.shape[1] + places[kept]).flatten())
        self._sentences, self._words = self._sentences[kept], words[kept]


class _Search(Decoding):
    """One search. lost: where the beam lost the greedy hypothesis, which can still become better.

    `_worst` has the score that a further result must exceed, and `_greedy` the place of the greedy hypothesis in the beam; -1:
    it ended or is lost.
    """

    def __init__(
        self, model: Transformer | Ensemble, source: Tensor, mask: Tensor | None, config: SearchConfig,
        demands: Demands | None, progress: TermProgress | None = None,
    ) -> None:  # fmt: skip
        """progress: in the terms of `demands`, which are otherwise ignored."""
        super().__init__(model, source, mask, config, config.beam, demands, terms=progress is not None)
        device, count = source.device, len(source)
        self._progress = progress
        self._longest = self._limits.float() ** config.normalization  # divides the log-probability in the best case
        self._scores = torch.full((count, config.beam), -math.inf, device=device)
        self._scores[:, 0] = 0.0  # start from one hypothesis; otherwise all would be equal
        self._greedy = torch.full((count,), 0 if progress is None else -1, device=device)
        self._worst = torch.full((count,), -math.inf, device=device)
        self._lost: dict[int, float] = {}  # the best score that a lost greedy hypothesis could have

    @property
    def lost(self) -> list[int]:
        full = [len(found) == self._config.n_best and found[-1].ended for found in self.results]
        return [row for row, best in self._lost.items() if not full[row] or best > self.results[row][-1].score]

    def _step(self, logs: Tensor) -> None:
        beam, progress = self._config.beam, self._progress
        if progress is None:
            candidates, parents, pieces, of_greedy = _extend(logs, self._scores, self._greedy)
        else:
            candidates, parents, pieces = progress.extend(logs, self._scores)
            of_greedy = self._greedy
        ended, possible = pieces == END, self._scores / self._longest[self._sentences, None]
        self._add_ended(candidates.masked_fill(~ended, -math.inf)[:, :beam], parents)
        at_limit = self._at_limit()
        self._add_broken_off(at_limit & candidates[:, 0].isfinite())
        opened = candidates.masked_fill(ended, -math.inf)
        scores, places = opened.topk(beam, dim=1) if progress is None else first_open(opened, beam)
        following = _row_of(of_greedy, places)
        has_ended = ended[:, :beam].gather(1, of_greedy.clamp(0, beam - 1)[:, None]).squeeze(1)
        has_ended &= (of_greedy >= 0) & (of_greedy < beam)
        for row in ((self._greedy >= 0) & (following < 0) & ~has_ended).nonzero().flatten().tolist():
            self._lost[int(self._sentences[row])] = float(possible[row, self._greedy[row]])
        alive = scores[:, 0].isfinite() & ~at_limit & (scores[:, 0] / self._longest[self._sentences] > self._worst)
        if beam == 1:
            alive &= following >= 0
        kept, parents, words = alive.nonzero().flatten(), parents.gather(1, places), pieces.gather(1, places)
        if progress is not None:
            progress.advance(parents, words, kept)
        self._scores, self._greedy, self._worst = scores[kept], following[kept], self._worst[kept]
        self._keep(kept, words, parents)

    def _add_ended(self, totals: Tensor, parents: Tensor) -> None:
        """Add the candidates (sentences, beam) that are not -inf to the results, if they are good enough."""
        count = self._config.n_best
        final = totals / (self._history.shape[2] + 1) ** self._config.normalization
        for row, rank in (final > self._worst[:, None]).nonzero().tolist():
            ids, found = self._history[row, parents[row, rank]].tolist(), self.results[int(self._sentences[row])]
            _add(found, Hypothesis(ids, float(totals[row, rank]), float(final[row, rank])), count)
            self._worst[row] = found[-1].score if len(found) == count else -math.inf

    def _add_broken_off(self, rows: Tensor) -> None:
        """Add the hypotheses of some sentences (bool) to their results, without END; only those with the most terms."""
        length = max(1, self._history.shape[2])
        wanted = self._scores.isfinite() if self._progress is None else self._progress.fullest(self._scores)
        for row, place in (wanted & rows[:, None]).nonzero().tolist():
            total, ids = float(self._scores[row, place]), self._history[row, place].tolist()
            broken_off = Hypothesis(ids, total, total / length**self._config.normalization, ended=False)
            _add(self.results[int(self._sentences[row])], broken_off, self._config.n_best)


def _add(best: list[Hypothesis], hypothesis: Hypothesis, count: int) -> None:
    """Insert a hypothesis into a list of at most `count`, best first; broken-off ones are kept only if none has ended."""
    if any((other.ids, other.ended) == (hypothesis.ids, hypothesis.ended) for other in best) or (
        best and best[0].ended and not hypothesis.ended
    ):
        return
    if best and hypothesis.ended and not best[0].ended:
        best.clear()
    best.append(hypothesis)
    best.sort(key=lambda other: -other.score)
    del best[count:]


def _extend(logs: Tensor, scores: Tensor, greedy: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the 2 * beam best extensions of each sentence's hypotheses, best first.

    The results are (totals, parents, pieces), each (sentences, 2 * beam), and the place of the greedy hypothesis' best
    extension among them (sentences,), -1 if there is none. At most `beam` extensions end (one per hypothesis), so at least
    `beam` others remain. logs (sentences, beam, vocabulary); scores (sentences, beam); greedy (sentences,).
    """
    beam, vocabulary = logs.shape[1:]
    width = min(2 * beam, vocabulary)
    best, pieces = logs.topk(width, dim=2)  # per hypothesis first: many short sorts run in parallel
    candidates, places = (best + scores[..., None]).flatten(1).topk(min(2 * beam, width * beam), dim=1)
    of_greedy = _row_of(torch.where(greedy >= 0, greedy * width, -1), places)
    return candidates, places // width, pieces.flatten(1).gather(1, places), of_greedy


def _row_of(place: Tensor, places: Tensor) -> Tensor:
    """Where `place` (sentences,) stands in `places` (sentences, n); -1 if it is missing, or negative."""
    same = (places == place[:, None]) & (place >= 0)[:, None]
    return torch.where(same.any(1), same.int().argmax(1), -1)
