"""Beam search for translations that contain terms: dynamic beam allocation, in tensor operations.

Post and Vilar (2018, "Fast Lexically Constrained Decoding with Dynamic Beam Allocation"), vectorized after Hu et al. (2019,
"Improved Lexically Constrained Decoding for Translation and Monolingual Rewriting"). The hypotheses that have the same number
of pieces of terms form a bank, and the banks fill the beam in turns. A shift-and automaton (Baeza-Yates and Gonnet 1992)
follows each term, so that terms may overlap.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nmt_train.corpus.vocabulary import END
from nmt_train.model.demand import Demands


class TermProgress:
    """How much of its sentence's terms each hypothesis of a beam has.

    done: the term has appeared, and its last word has ended (sentences, beam, terms). matched: the last n + 1 pieces of the
    hypothesis are the first n + 1 pieces of the term (sentences, beam, terms, longest term).
    """

    def __init__(self, demands: Demands, beam: int) -> None:
        self._continues = demands.kinds.continues
        terms = [demand.terms for demand in demands.each]
        most, longest = max(map(len, terms)), max(len(term) for those in terms for term in those)
        padded = [[*map(list, those), *[[]] * (most - len(those))] for those in terms]
        device = self._continues.device
        self._lengths = torch.tensor([[len(term) for term in those] for those in padded], device=device)
        self._terms = torch.tensor(
            [[[*term, *[-1] * (longest - len(term))] for term in those] for those in padded], device=device
        )
        self._done = (self._lengths == 0)[:, None].repeat(1, beam, 1)
        self._matched = torch.zeros(len(terms), beam, most, longest, dtype=torch.bool, device=device)

    def extend(self, logs: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the totals, parents and pieces of 2 * beam extensions (sentences, 2 * beam), the banks in turns.

        logs: log-probabilities (sentences, beam, vocabulary); scores: (sentences, beam).

        END follows only hypotheses that have all terms. At least one extension adds a piece to the fullest bank, until the
        terms are complete; so some hypothesis has them after as many steps as they have pieces.
        """
        beam, vocabulary = logs.shape[1:]
        best, pieces = logs.topk(min(2 * beam, vocabulary), dim=2)
        needed = self._needed()
        repeated = (needed[..., None] == pieces[..., None, :]).any(3)
        repeated |= (needed[..., None] == needed[..., None, :]).tril(-1).any(3)
        needed_logs = logs.gather(2, needed.clamp(min=0)).masked_fill(repeated | (needed < 0), -math.inf)
        pieces = torch.cat([pieces, needed.clamp(min=0)], dim=2)
        totals = torch.cat([best, needed_logs], dim=2) + scores[..., None]
        has_all = (self._done | self._complete(self._matched)).all(2)
        totals = totals.masked_fill((pieces == END) & ~has_all[..., None], -math.inf).flatten(1)
        places = _in_turns(totals, self._bank(*self._after(pieces)).flatten(1))[:, : 2 * beam]
        width = pieces.shape[2]
        return totals.gather(1, places), places // width, pieces.flatten(1).gather(1, places)

    def fullest(self, scores: Tensor) -> Tensor:
        """Which hypotheses are in the fullest bank of their sentence: bool, like scores (sentences, beam)."""
        banks = self._bank(self._done, self._matched).masked_fill(~scores.isfinite(), -1)
        return (banks == banks.amax(1, keepdim=True)) & (banks >= 0)

    def advance(self, parents: Tensor, words: Tensor, kept: Tensor) -> None:
        """Add a word to the hypotheses at `parents`, both (sentences, beam); then keep some sentences."""
        rows = torch.arange(len(parents), device=parents.device)[:, None]
        self._done, self._matched = self._done[rows, parents], self._matched[rows, parents]
        done, matched = self._after(words[..., None])
        self._done, self._matched = done[kept, :, 0], matched[kept, :, 0]
        self._terms, self._lengths = self._terms[kept], self._lengths[kept]

    def _after(self, pieces: Tensor) -> tuple[Tensor, Tensor]:
        """`done` and `matched` after each of the pieces (sentences, beam, n); n is a further dimension."""
        ends = ~self._continues[pieces][..., None]
        done = self._done[:, :, None] | (self._complete(self._matched)[:, :, None] & ends)
        before = torch.cat([torch.ones_like(self._matched[..., :1]), self._matched[..., :-1]], dim=3)
        return done, before[:, :, None] & (pieces[..., None, None] == self._terms[:, None, None])

    def _complete(self, matched: Tensor) -> Tensor:
        """Which terms the hypotheses end with; the last word of the term may still be continued."""
        last = (self._lengths - 1).clamp(min=0)[:, None, :, None].expand(*matched.shape[:3], 1)
        return matched.gather(3, last)[..., 0] & (self._lengths > 0)[:, None]

    def _bank(self, done: Tensor, matched: Tensor) -> Tensor:
        """The number of pieces of terms that hypotheses have: (sentences, beam) or (sentences, beam, n)."""
        lengths = self._lengths.view(len(self._lengths), *[1] * (done.dim() - 2), -1)
        return torch.where(done, lengths, _longest(matched)).sum(-1)

    def _needed(self) -> Tensor:
        """The next piece of each term (sentences, beam, terms); -1 if the hypothesis has the term."""
        progress = _longest(self._matched).clamp(max=self._terms.shape[2] - 1)
        following = self._terms[:, None].expand_as(self._matched).gather(3, progress[..., None])[..., 0]
        return following.masked_fill(self._done | self._complete(self._matched), -1)


def first_open(opened: Tensor, beam: int) -> tuple[Tensor, Tensor]:
    """Return the scores and places of the first `beam` candidates that are not -inf, sorted by score (sentences, beam)."""
    turns = torch.arange(opened.shape[1], device=opened.device).expand_as(opened)
    places = (turns + opened.shape[1] * opened.isinf()).argsort(dim=1)[:, :beam]
    scores, order = opened.gather(1, places).sort(dim=1, descending=True, stable=True)
    return scores, places.gather(1, order)


def _longest(matched: Tensor) -> Tensor:
    """The number of pieces of each term that a hypothesis ends with, by `matched` (..., longest)."""
    return (matched * torch.arange(1, matched.shape[-1] + 1, device=matched.device)).amax(-1)


def _in_turns(totals: Tensor, banks: Tensor) -> Tensor:
    """Order candidates (sentences, n): the best of every bank, the fullest bank first; then the second best; -inf last."""
    count = totals.shape[1]
    by_score = totals.argsort(dim=1, descending=True, stable=True)
    order = by_score.gather(1, banks.gather(1, by_score).argsort(dim=1, descending=True, stable=True))
    ordered, numbers = banks.gather(1, order), torch.arange(count, device=totals.device).expand_as(order)
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    turn = numbers - (numbers * begins).cummax(dim=1).values
    turn = turn.masked_fill(totals.gather(1, order).isinf(), count)
    return order.gather(1, (turn * count + numbers).argsort(dim=1))
