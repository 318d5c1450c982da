"""Finds errors in the files of corpora and validation sets before a vocabulary is trained and a corpus is tokenized."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from nmt_train.common.errors import UserError, remedy, unreadable
from nmt_train.common.section import listed
from nmt_train.corpus import CorpusConfig, ValidationSet, alignment, untagged
from nmt_train.corpus.text import read_lines, read_pairs, read_weights, sides


def file_checks(corpus: CorpusConfig) -> list[Callable[[], None]]:
    """For each training corpus and validation set, a check of its files, which raises UserError for the first error."""
    checks: list[Callable[[], None]] = [partial(_check_corpus, corpus, number) for number in range(len(corpus.parts))]
    return [*checks, *(partial(_check_set, corpus, test) for test in corpus.validation_sets)]


def _check_corpus(corpus: CorpusConfig, number: int) -> None:
    """Look into the files of a training corpus; to read all of them takes longer."""
    part, key, ratio = corpus.parts[number], corpus.label(number), corpus.max_ratio
    for path in (path for side in sides(part.files, key) for path in side):
        _refuse_unreadable(path, key)
        next(read_lines(path, ratio), None)
    if part.sentence_weights is not None:
        if part.sentence_weights != "column":
            _refuse_unreadable(os.path.expanduser(part.sentence_weights), f"{key}: sentence_weights")
        next(read_weights(part, key, ratio), None)
    for path in alignment.paths(part):
        _refuse_unreadable(path, f"{key}: alignments")
        next(read_lines(path, ratio), None)


def _check_set(corpus: CorpusConfig, test: ValidationSet) -> None:
    """Read the files of a validation set."""
    for path in (path for side in sides(test.files, test.label) for path in side):
        _refuse_unreadable(path, test.label)
    _check_tags(corpus, test, (source for source, _ in read_pairs(test.files, test.label, corpus.max_ratio)))


def _check_tags(corpus: CorpusConfig, test: ValidationSet, sources: Iterable[str]) -> None:
    """Read all sources of a validation set; UserError if one lacks a tag, but all sources of the training corpora have one."""
    tags = list(dict.fromkeys(part.tag for part in corpus.parts))
    if test.tag and "" not in tags and test.tag not in tags:
        raise UserError(f"{test.label}: no training corpus has the tag {test.tag}; choose {listed(dict.fromkeys(tags))}")
    for number in () if test.tag else untagged(sources, tags):
        raise UserError(
            f"{test.label}, line {number}: has no tag, but all sources of the training corpora have one; give the set its"
            f" tag, as in {{files: ..., tag: '{tags[0]}'}}, or begin each of its sources with one"
        )
    for _ in sources:  # which checks the rest of the files, too
        pass


def _refuse_unreadable(path: str, key: str) -> None:
    """Raise UserError if a file cannot be opened, or is a pipe: a second reader would get only what the first one has left.

    key: what names the file in the configuration.
    """
    if Path(path).is_fifo():
        raise UserError(f"{key}: {path}: is a pipe, but a corpus is read several times; write it to a file first")
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise UserError(f"{key}: {unreadable(path, error)}; {remedy(error, 'check the file')}") from None
