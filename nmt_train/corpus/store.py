"""Stores the piece ids of the tokenized corpus in memory-mapped files, so that memory use does not grow with the corpus.

A store is an entry of the user's cache (cache.py). Its name contains a digest of the text and of the vocabulary; a change in
any of them gives another name. A run that builds a store writes a temporary folder and renames it when complete, so two runs
may build the same store at the same time.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from nmt_train.common.errors import UserError
from nmt_train.common.streams import tell
from nmt_train.corpus import MAX_RATIO, CorpusConfig, CorpusPart, cache
from nmt_train.corpus.build_store import build_store
from nmt_train.corpus.mapped_file import mapped
from nmt_train.corpus.side import Side, side_in
from nmt_train.corpus.survey import Survey
from nmt_train.corpus.unknown import UnknownCharacters
from nmt_train.corpus.vocabulary import Vocabulary

_FORMAT = 2
_CACHE = 100e9  # bytes of tokenized corpora and vocabularies in a cache, at most


@dataclass(frozen=True)
class Store:
    """Both sides of a corpus; pair i is line i + 1 of its files, empty lines included.

    weights: those of the pairs (pairs,), float32, or None if all are 1. links: those of the pairs, each two numbers as in
    `WholeWords.of_ids`, or None. held: an open file that protects the store. checksum: of all that is stored. unknown: the
    characters of its text that the vocabulary lacks.
    """

    path: Path
    source: Side
    target: Side
    weights: np.ndarray | None = None
    links: Side | None = None
    held: BinaryIO | None = None
    checksum: str = ""
    unknown: UnknownCharacters = field(default_factory=UnknownCharacters)

    def __len__(self) -> int:
        return len(self.source.offsets) - 1


class Stores:
    """The training corpora, concatenated: pairs are numbered consecutively through all of them.

    tags: for each corpus, the ids of the pieces to put before each of its sources. weighted, aligned: whether pairs have
    weights, or alignments.
    """

    def __init__(self, stores: Sequence[Store], tags: Sequence[np.ndarray]) -> None:
        self._stores, self.tags = stores, tags
        self.weighted = any(store.weights is not None for store in stores)
        self.aligned = any(store.links is not None for store in stores)
        # The number of each corpus's first pair, then the number of all pairs.
        self._first = list(accumulate(map(len, stores), initial=0))

    def __len__(self) -> int:
        return self._first[-1]

    def __getitem__(self, pair: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids of the source with its tag, and of the target."""
        number, line = self.place(pair)
        store, tag = self._stores[number], self.tags[number]
        source = store.source[line - 1]
        return (np.concatenate([tag, source]) if len(tag) and len(source) else source), store.target[line - 1]

    def rows(self, pairs: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The sources, with their tags, and the targets of several pairs."""
        if len(self._stores) == 1 and not len(self.tags[0]):  # the usual case, without a search for every pair
            store = self._stores[0]
            return store.source.rows(pairs), store.target.rows(pairs)
        sources, targets = zip(*(self[pair] for pair in pairs), strict=True)
        return list(sources), list(targets)

    def weight(self, pair: int) -> float:
        """The weight of a pair in the cost."""
        number, line = self.place(pair)
        weights = self._stores[number].weights
        return 1.0 if weights is None else float(weights[line - 1])

    def links(self, pair: int) -> np.ndarray:
        """The links of a pair (links, 2), with numbers as in `WholeWords.of_ids`, its tag left out."""
        number, line = self.place(pair)
        links = self._stores[number].links
        return np.zeros((0, 2), np.int64) if links is None else links[line - 1].reshape(-1, 2).astype(np.int64)

    def tag(self, pair: int) -> np.ndarray:
        """The ids of the tag of a pair."""
        return self.tags[self.place(pair)[0]]

    def place(self, pair: int) -> tuple[int, int]:
        """The number of the corpus that a pair is in, from 0, and of its line there, from 1."""
        number = bisect_right(self._first, pair) - 1
        return number, pair - self._first[number] + 1

    def lengths(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each corpus, the number of pieces of each source, with its tag, and of each target; int32 (pairs,)."""
        found = []
        for store, tag in zip(self._stores, self.tags, strict=True):
            source, target = (side.lengths.astype(np.int32) for side in (store.source, store.target))
            found.append((source + np.int32(len(tag)) * (source > 0) if len(tag) else source, target))
        return found

    @property
    def tokens(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each corpus, the ids of all sources, and of all targets (tokens,), without tags."""
        return [(store.source.tokens, store.target.tokens) for store in self._stores]

    @property
    def identity(self) -> list[dict[str, Any]]:
        """What identifies the content of each store, as JSON: its pairs, and a checksum."""
        return [{"pairs": len(store), "checksum": store.checksum} for store in self._stores]

    @property
    def unknown(self) -> UnknownCharacters:
        """Those of all corpora."""
        found = UnknownCharacters()
        for store in self._stores:
            found.merge(store.unknown)
        return found

    @property
    def paths(self) -> list[Path]:
        return [store.path for store in self._stores]


def check_tags(config: CorpusConfig, vocabulary: Vocabulary) -> None:
    """Raise UserError if the vocabulary does not know the tag of a corpus."""
    for number, part in enumerate(config.parts):
        if not vocabulary.knows(part.tag):
            raise UserError(
                f"{config.label(number)}: tag {part.tag} is unknown to the vocabulary of this run; choose one that it knows"
            )


def open_stores(config: CorpusConfig, vocabulary: Vocabulary, fallback: Path, survey: Survey | None = None) -> Stores:
    """Open or build the stores of all training corpora, in the cache or, if it cannot be written, in `fallback`.

    survey: of these corpora, if there is one. Raises UserError as `open_store` does, and if too many pairs are over-long.
    """
    parts, folders = config.parts, cache.folders(config.cache, fallback)
    check_tags(config, vocabulary)
    cache.allow_many_files()
    survey = survey or Survey(config)

    def prepare(number: int) -> int:
        survey.check_lengths(lambda lines, side: [*map(len, vocabulary.encode(lines, side))])
        make_room(cache.text_size(parts[number], config.label(number)))
        return survey.counts[number]

    def make_room(coming: int) -> None:
        for folder in folders[:-1]:
            with suppress(OSError):  # a folder that does not exist yet, or cannot be read
                cache.make_room(folder, _CACHE, coming)

    stores = [
        open_store(part, config.label(number), vocabulary, folders, config.max_ratio, partial(prepare, number))
        for number, part in enumerate(parts)
    ]
    make_room(0)
    return Stores(stores, [np.array(vocabulary.encode([part.tag])[0], dtype=np.int64) for part in parts])


def open_store(
    part: CorpusPart, key: str, vocabulary: Vocabulary, folders: Sequence[Path], ratio: float = MAX_RATIO,
    prepare: Callable[[], int | None] = lambda: None,
) -> Store:  # fmt: skip
    """Open the store of a corpus, or build it in the first of `folders` that can be written.

    key: the configuration key of the corpus, for error messages. ratio: as for `read_lines`. prepare: called before a store is
    built; returns the number of pairs, if it is known. Raises UserError if the text is invalid or the disk cannot hold the
    store.
    """
    name = _name(part, key, vocabulary)
    store = cache.find(folders, name, _map)
    if store is not None:
        return store
    pairs = prepare()
    tell(f"nmt-train: tokenizing {key}")  # the log is not open yet
    return cache.build(folders, name, _map, lambda folder: build_store(folder, part, key, vocabulary, ratio, pairs))


def is_built(part: CorpusPart, key: str, vocabulary: Vocabulary, folders: Sequence[Path]) -> bool:
    """Whether there is a store of this corpus and vocabulary."""
    return any((folder / _name(part, key, vocabulary) / cache.READY).exists() for folder in folders)


def _name(part: CorpusPart, key: str, vocabulary: Vocabulary) -> str:
    return cache.name("corpus", [_FORMAT, vocabulary.digest, cache.fingerprints(part, key)])


def _map(path: Path) -> Store:
    held = cache.hold(path)
    try:
        facts = json.loads(held.read())
        sides = [side_in(path, name, facts["dtype"]) for name in ("source", "target")]
        links = side_in(path, "links", np.uint32) if (path / "links.tokens").exists() else None
        for side in (*sides, links or sides[0]):
            if len(side.offsets) != facts["pairs"] + 1 or side.offsets[-1] != len(side.tokens):
                raise ValueError("sizes disagree")
        weights = mapped(path / "weights", np.float32) if (path / "weights").exists() else None
        if weights is not None and len(weights) != facts["pairs"]:
            raise ValueError("sizes disagree")
        checksum, unknown = str(facts["checksum"]), UnknownCharacters(facts.get("unknown"))
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: damaged ({error}); delete this folder, and the next start rebuilds it") from None
    return Store(path, sides[0], sides[1], weights, links, held, checksum, unknown)
