"""What the user demands of a translation (a prefix, terms, copies of unknown words), and which pieces may therefore follow."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nmt_train.corpus.vocabulary import BEGIN, END, PAD, SPACE, UNKNOWN, Vocabulary
from nmt_train.model.bleu import AUTO, DEFAULT, choose_tokenizer


@dataclass(frozen=True)
class Demand:
    """What the translation of one source must have, as piece ids.

    prefix: it begins with these. word_ends: the piece after the prefix begins another word. terms: it contains each of these,
    and no piece that continues a word follows. unknown: it may have this number of unknown pieces after the prefix.
    """

    prefix: tuple[int, ...] = ()
    word_ends: bool = False
    terms: tuple[tuple[int, ...], ...] = ()
    unknown: int = 0

    @property
    def term_pieces(self) -> int:
        return sum(map(len, self.terms))

    def has_terms(self, ids: Sequence[int], kinds: PieceKinds) -> bool:
        """Whether a translation (ids without END) contains all terms."""
        whole = (*ids, END)
        return all(
            any(
                whole[start : start + len(term)] == term and not bool(kinds.continues[whole[start + len(term)]])
                for start in range(len(whole) - len(term))
            )
            for term in self.terms
        )


NOTHING = Demand()


class PieceKinds(NamedTuple):
    """begins: the piece begins a word, or is END; continues: it continues one; both (vocabulary,), bool."""

    begins: Tensor
    continues: Tensor

    @staticmethod
    def of(vocabulary: Vocabulary, device: torch.device) -> PieceKinds:
        pieces = [vocabulary.piece(number) for number in range(len(vocabulary))]
        begins = torch.tensor([piece.startswith(SPACE) for piece in pieces], device=device)
        begins[END] = True
        return PieceKinds(begins, torch.tensor([continues_word(piece) for piece in pieces], device=device))


def continues_word(piece: str) -> bool:
    """Whether a piece continues the word before it: its first character is a letter, digit or mark of a script with spaces."""
    first = piece[:1]
    return (first.isalnum() or unicodedata.category(first or " ")[0] == "M") and not without_spaces(first)


def without_spaces(character: str) -> bool:
    """Whether the script of a character is written without spaces between words."""
    return choose_tokenizer(AUTO, [character]) != DEFAULT


class Demands:
    """The demands of the sentences of a batch. each: one per sentence."""

    def __init__(self, each: Sequence[Demand], kinds: PieceKinds) -> None:
        self.each, self.kinds = list(each), kinds
        device = kinds.begins.device
        prefixes = [torch.tensor(demand.prefix, dtype=torch.long) for demand in each]
        self._prefix = pad_sequence(prefixes, batch_first=True, padding_value=-1).to(device)
        self._length = torch.tensor([len(demand.prefix) for demand in each], device=device)
        self._word_ends = torch.tensor([demand.word_ends for demand in each], device=device)
        unknown = [demand.unknown + demand.prefix.count(UNKNOWN) for demand in each]
        self._unknown = torch.tensor(unknown, device=device)

    def pick(self, rows: Sequence[int]) -> Demands:
        """The demands of some of the sentences."""
        return Demands([self.each[row] for row in rows], self.kinds)

    def lengths(self, terms: bool) -> list[int]:
        """For each sentence, the number of pieces that its translation must have; terms: whether those of terms count."""
        return [len(demand.prefix) + demand.term_pieces * terms for demand in self.each]

    def allowed(self, history: Tensor, vocabulary: int) -> Tensor:
        """Which pieces may follow the hypotheses (sentences, beam, length), terms aside: bool (sentences, beam, vocabulary)."""
        step = history.shape[2]
        allowed = torch.ones(*history.shape[:2], vocabulary, dtype=torch.bool, device=history.device)
        allowed[..., [PAD, BEGIN]] = False
        allowed[..., UNKNOWN] = (history == UNKNOWN).sum(2) < self._unknown[:, None]
        allowed[self._word_ends & (self._length == step)] &= self.kinds.begins
        if step < self._prefix.shape[1]:
            forced = self._prefix[:, step]
            rows = (forced >= 0).nonzero().flatten()
            allowed[rows] = False
            allowed[rows, :, forced[rows]] = True
        return allowed


def permitted(logits: Tensor, history: Tensor, demands: Demands | None) -> Tensor:
    """Return log-probabilities (sentences, beam, vocabulary), fp32: -inf for pieces that may not follow `history`."""
    logs = torch.log_softmax(logits.float(), dim=-1)
    if demands is None:
        logs[..., [PAD, UNKNOWN, BEGIN]] = -math.inf
        return logs
    return logs.masked_fill_(~demands.allowed(history, logs.shape[-1]), -math.inf)
