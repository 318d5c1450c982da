"""The part of the page about text: the training corpora and the validation sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nmt_train.check.inspection import SAMPLE, Inspection, in_other_script, scripts
from nmt_train.check.page import Page, share
from nmt_train.corpus import CorpusConfig
from nmt_train.corpus.side import Side
from nmt_train.corpus.store import Store, Stores
from nmt_train.corpus.survey import Survey
from nmt_train.corpus.swapped import EXCHANGED, Sides, swapped
from nmt_train.corpus.text import read_pairs
from nmt_train.corpus.vocabulary import SOURCE, TARGET, UNKNOWN, Vocabulary
from nmt_train.model.metrics import TestSets

Pairs = Sequence[tuple[str, str]]

_CHARACTERS = 1_000_000  # to train a vocabulary on that stands for the run's own
# Shares from which the page warns: of the pairs of a corpus, of a validation set, and of pieces.
_EMPTY, _COPIES, _REPEATED, _LONG, _FOREIGN, _EXCHANGED = 0.01, 0.02, 0.1, 0.02, 0.02, 0.02
_LEAKED, _UNKNOWN = 0.01, 0.001


@dataclass(frozen=True)
class Read:
    """What one pass over all files has found. heldout: the pairs of each validation set."""

    survey: Survey
    corpora: list[Inspection]
    heldout: list[list[tuple[str, str]]]


class SampledStores(Stores):
    """Random pairs of the training corpora in place of all; `identity` has the number of all."""

    def __init__(self, stores: Sequence[Store], tags: Sequence[np.ndarray], counts: Sequence[int]) -> None:
        super().__init__(stores, tags)
        self._counts = counts

    @property
    def identity(self) -> list[dict[str, Any]]:
        return [{"pairs": count, "checksum": ""} for count in self._counts]


def read(corpus: CorpusConfig) -> Read:
    """Read all files. Raises UserError as `Survey` and `read_pairs` do."""
    heldout = [list(read_pairs(part.files, part.label, corpus.max_ratio)) for part in corpus.validation_sets]
    digests = frozenset(hash(pair) for pairs in heldout for pair in pairs)
    corpora = [Inspection(digests) for _ in corpus.parts]
    survey = Survey(corpus, _CHARACTERS, [its.add for its in corpora])
    assert survey.counts == [its.pairs for its in corpora]
    return Read(survey, corpora, heldout)


def sampled(corpus: CorpusConfig, found: Read, vocabulary: Vocabulary) -> SampledStores:
    """The sampled pairs, tokenized."""
    stores = []
    for its in found.corpora:
        source, target = (_side(vocabulary.encode([pair[side] for pair in its.sample], side)) for side in (SOURCE, TARGET))
        stores.append(Store(Path(), source, target))
    tags = [np.array(vocabulary.encode([part.tag])[0], dtype=np.int64) for part in corpus.parts]
    return SampledStores(stores, tags, [its.pairs for its in found.corpora])


def _side(ids: list[list[int]]) -> Side:
    offsets = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    return Side(np.fromiter((piece for line in ids for piece in line), np.int64, int(offsets[-1])), offsets)


def describe(page: Page, corpus: CorpusConfig, found: Read, stores: Stores, test_sets: TestSets) -> None:
    """Print a line for everything that was found in the training corpora and the validation sets."""
    for number, its in enumerate(found.corpora):
        page.title(f"{corpus.label(number)}{f' (from scripts on: of {SAMPLE:,} random pairs)' if its.pairs > SAMPLE else ''}")
        _counts(page, its)
        _scripts(page, its.sample)
        _lengths(page, corpus, *stores.lengths()[number])
        _unknown(page, *stores.tokens[number])
        _direction(page, corpus, stores, number, found)
    leaked = set[int]().union(*(its.leaked for its in found.corpora))
    exchanged = test_sets.swapped(corpus, stores)
    for part, pairs in zip(corpus.validation_sets, found.heldout, strict=True):
        page.title(part.label)
        page.line("pairs", f"{len(pairs):,}")
        known = sum(hash(pair) in leaked for pair in pairs)
        page.line(
            "leaked", f"{share(known, len(pairs))} are in the training corpora, too",
            "its metrics will look too good: remove these pairs from the training corpora" * (known > _LEAKED * len(pairs)),
        )  # fmt: skip
        _scripts(page, pairs)
        if part.label in exchanged:
            page.line("direction", "the reverse of the training corpora", EXCHANGED)


def _counts(page: Page, its: Inspection) -> None:
    """Print what was counted in all pairs."""
    page.line("pairs", f"{its.pairs:,}, the same number of lines on both sides")
    page.line(
        "empty", f"{share(its.empty, its.pairs)} have an empty side, and are left out",
        "check that equal line numbers belong together" * (its.empty > _EMPTY * its.pairs),
    )  # fmt: skip
    page.line(
        "copies", f"{share(its.copies, its.pairs)} have a target equal to the source",
        "the model learns to copy instead of translating: remove these pairs" * (its.copies > _COPIES * its.pairs),
    )  # fmt: skip
    repeated = its.repeated
    warning = "they count more than others: remove them" * (repeated > _REPEATED)
    page.line("repeated", f"{repeated:.1%} are equal to an earlier pair", warning)


def _scripts(page: Page, pairs: Pairs) -> None:
    said, warnings = [], []
    for number, name in enumerate(("source", "target")):
        lines = [pair[number] for pair in pairs]
        found = [(script, part) for script, part in scripts(lines).items() if part >= 0.005]
        said.append(f"{name} {', '.join(f'{script} {part:.0%}' for script, part in found[:3]) or 'no letters'}")
        if found and (foreign := in_other_script(lines, found[0][0])) > _FOREIGN:
            warnings.append(f"{foreign:.1%} of the {name} lines are in another script than {found[0][0]}")
    page.line("scripts", "; ".join(said), f"{' and '.join(warnings)}: remove lines of other languages" * bool(warnings))


def _lengths(page: Page, corpus: CorpusConfig, source: np.ndarray, target: np.ndarray) -> None:
    sides = {"source": source, "target": target}
    said = (f"{name} {side.mean():.1f} words on average, 99%: {np.percentile(side, 99):.0f}" for name, side in sides.items())
    page.line("length", "; ".join(said))
    long = float((np.maximum(source, target) > corpus.max_length).mean())
    page.line(
        "over-long", f"{long:.1%} have a side of more than {corpus.max_length} words (corpus.max_length), and are left out",
        "raise corpus.max_length, or split these lines" * (long > _LONG),
    )  # fmt: skip


def _unknown(page: Page, source: np.ndarray, target: np.ndarray) -> None:
    part = float((np.concatenate([source, target]) == UNKNOWN).mean())
    page.line(
        "unknown", f"{part:.2%} of the words are unknown to the vocabulary",
        "raise corpus.vocabulary.character_coverage, or remove lines of other languages" * (part > _UNKNOWN),
    )  # fmt: skip


def _direction(page: Page, corpus: CorpusConfig, stores: Stores, number: int, found: Read) -> None:
    """Print whether sides look exchanged: in single pairs, and in the whole corpus, compared with the largest of its tag."""
    sides = Sides(*stores.tokens[number])
    if sides.alike:
        page.line("languages", "the same on both sides", "source and target look alike: are these the right files?")
        return
    alike = [other for other, part in enumerate(corpus.parts) if part.tag == corpus.parts[number].tag]
    largest = max(alike, key=lambda other: found.corpora[other].pairs)
    lines = _lines(stores, number)
    if largest != number and swapped(stores.tokens[largest], lines):
        page.line("direction", f"the reverse of {corpus.label(largest)}", EXCHANGED)
    else:
        part = sides.share_exchanged(*lines)
        page.line(
            "direction", f"{part:.1%} of the pairs look like the opposite one",
            "exchange source and target of these pairs" * (part > _EXCHANGED),
        )  # fmt: skip


def _lines(stores: Stores, number: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The piece ids of each source and target of a corpus, with tags."""
    before = sum(len(source) for source, _ in stores.lengths()[:number])
    return stores.rows(np.arange(before, before + len(stores.lengths()[number][0])))
