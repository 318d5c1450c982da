"""Lines to translate, each with what the user demands of its translation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from nmt_train.common.errors import UserError
from nmt_train.corpus.text import Lines, read_lines
from nmt_train.corpus.vocabulary import SPACE, TARGET, UNKNOWN, Vocabulary
from nmt_train.model.demand import NOTHING, Demand, without_spaces


class Request(NamedTuple):
    """A line to translate. prefix: the text that its translation begins with, which `demand` has as piece ids."""

    text: str
    prefix: str = ""
    demand: Demand = NOTHING


class _File:
    """A file that has a line for each line of input."""

    def __init__(self, path: Path) -> None:
        self._path, self._lines = path, read_lines(path)

    def line(self, number: int) -> str:
        """The next line, which belongs to this line of input. Raises UserError if there is none."""
        line = next(self._lines, None)
        if line is None:
            raise UserError(
                f"{self._path}: ends after line {number - 1}, but the input has more lines; give one line per line of input,"
                " empty where nothing is demanded"
            )
        return line

    def expect_end(self, number: int) -> None:
        """Raise UserError if there are more lines than these lines of input."""
        if next(self._lines, None) is not None:
            raise UserError(
                f"{self._path}, line {number + 1}: the input ends after line {number}; give one line per line of input"
            )


class Requests:
    """Each line with its own line of the files of prefixes and terms, which are read in step; up to the first error.

    error: an error in these files, after which no line was read.
    """

    def __init__(self, lines: Lines, vocabulary: Vocabulary, prefixes: Path | None = None, terms: Path | None = None) -> None:
        """prefixes: a file with a prefix per line. terms: a file with the terms of a line per line, separated by tabs."""
        self._lines, self._vocabulary, self._prefixes, self._terms = lines, vocabulary, prefixes, terms
        self.error: UserError | None = None

    def __iter__(self) -> Iterator[Request]:
        try:
            yield from self._read()
        except UserError as error:
            self.error = error

    def _read(self) -> Iterator[Request]:
        files = [None if path is None else _File(path) for path in (self._prefixes, self._terms)]
        number = 0
        for number, text in enumerate(self._lines, 1):
            prefix, terms = ("" if file is None else file.line(number) for file in files)
            yield self._request(text, prefix, self._split(terms, number))
        if self._lines.error is None:
            for file in filter(None, files):
                file.expect_end(number)

    def _request(self, text: str, prefix: str, terms: tuple[tuple[int, ...], ...]) -> Request:
        stripped = prefix.strip()
        ids = self._encode(stripped) if stripped else ()
        if not (ids or terms):
            return Request(text)
        ends = bool(ids) and prefix[-1].isspace() and not self._vocabulary.piece(ids[-1]).endswith(SPACE)
        return Request(text, stripped if ids else "", Demand(ids, ends, terms))

    def _split(self, line: str, number: int) -> tuple[tuple[int, ...], ...]:
        """The ids of each different term of a line. Raises UserError for a character that no piece has."""
        terms = []
        for term in filter(None, map(str.strip, line.split("\t"))):
            ids = self._encode(term)
            if UNKNOWN in ids:
                unknown = "".join(self._vocabulary.unknown([term], TARGET)[0])
                raise UserError(
                    f"{self._terms}, line {number}: the vocabulary lacks {unknown} of the term {term}; spell it without, or"
                    " remove it"
                )
            terms.append(self._without_space(ids) if without_spaces(term[0]) else ids)
        return tuple(dict.fromkeys(filter(None, terms)))

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._vocabulary.encode([text], TARGET)[0])

    def _without_space(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """The ids without the space that SentencePiece puts before a text, if pieces allow it."""
        first = self._vocabulary.piece(ids[0]).removeprefix(SPACE)
        if not first:
            return ids[1:]
        return (self._ids.get(first, ids[0]), *ids[1:])

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {self._vocabulary.piece(number): number for number in range(len(self._vocabulary))}
