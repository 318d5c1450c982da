"""Reads word alignments in Pharaoh format: for each pair of a corpus, which words of the source and the target belong together.

The words are those that whitespace separates in the lines of the corpus (*whole words*), which have one piece or several.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from nmt_train.common.errors import UserError
from nmt_train.common.plural import counted
from nmt_train.corpus import MAX_RATIO, CorpusPart
from nmt_train.corpus.text import read_lines, read_pairs

_LINE = re.compile(r"\s*(?:[0-9]{1,9}-[0-9]{1,9}(?:\s+|$))*")
_LINK = re.compile(r"[0-9]{1,9}-[0-9]{1,9}")


class AlignedPair(NamedTuple):
    """Two lines, and their links (links, 2), int64: the numbers from 0 of a whole word of the source and of the target."""

    source: str
    target: str
    links: np.ndarray


def paths(part: CorpusPart) -> list[str]:
    """The alignment files of a corpus, in order."""
    files = [part.alignments] if isinstance(part.alignments, str) else part.alignments or []
    return [os.path.expanduser(path) for path in files]


def read_aligned(part: CorpusPart, key: str, ratio: float = MAX_RATIO) -> Iterator[AlignedPair]:
    """Yield the pairs of a corpus with `alignments`; arguments as for `read_pairs`.

    Raises UserError if a line is not in Pharaoh format, if it names a word that its pair does not have, or if there is not one
    line for each pair.
    """
    lines = ((path, number, line) for path in paths(part) for number, line in enumerate(read_lines(path, ratio), 1))
    pairs, count = read_pairs(part.files, key, ratio), 0
    for count, (source, target) in enumerate(pairs, 1):
        line = next(lines, None)
        if line is None:
            raise _differing(part, key, count - 1, count + sum(1 for _ in pairs))
        yield AlignedPair(source, target, _links(*line, len(source.split()), len(target.split())))
    if more := sum(1 for _ in lines):
        raise _differing(part, key, count + more, count)


def described(part: CorpusPart, key: str) -> str:
    """The alignment files of a corpus, for error messages."""
    return f"{key}: alignments: {', '.join(paths(part))}"


def _differing(part: CorpusPart, key: str, lines: int, pairs: int) -> UserError:
    return UserError(
        f"{described(part, key)} has {counted(lines, 'line')}, and the corpus {pairs:,}; give one per pair, empty without links"
    )


def _links(path: str, number: int, line: str, source: int, target: int) -> np.ndarray:
    """The links of a line. source, target: how many whole words the pair has."""
    if not _LINE.fullmatch(line):
        wrong = next(text for text in line.split() if not _LINK.fullmatch(text))
        raise UserError(
            f"{path}, line {number}: {wrong[:40]!r} is not a link; write the numbers of a source word and of a target word,"
            " from 0, as 0-0 1-2"
        )
    links = np.array([*map(int, line.replace("-", " ").split())], np.int64).reshape(-1, 2)
    if (beyond := (links >= (source, target)).any(1)).any():
        wrong = "-".join(map(str, links[beyond][0]))
        raise UserError(
            f"{path}, line {number}: link {wrong} is outside of its pair, which has {counted(source, 'source word')} and"
            f" {counted(target, 'target word')} between spaces, numbered from 0; align this text again"
        )
    return links
