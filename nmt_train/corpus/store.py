"""Stores the piece ids of the tokenized corpus in memory-mapped files, so that memory use does not grow with the corpus.

A store is a folder in the user's cache (cache.py). Its name contains a digest of the files (path, size, modification time) and
of the vocabulary; a change in any of them gives another name. A run that builds a store writes a temporary folder and renames
it when complete, so two runs may build the same store at the same time.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import secrets
import shutil
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import BinaryIO

import numpy as np

from nmt_train.common import atomic_file as durable
from nmt_train.common.errors import UserError, unreadable
from nmt_train.common.streams import tell
from nmt_train.corpus import MAX_RATIO, CorpusConfig, CorpusPart, cache
from nmt_train.corpus.text import read_pairs, read_weights, sides
from nmt_train.corpus.vocabulary import Vocabulary

_FORMAT = 1
_CHECKED = 20_000_000  # tokens per side that the checksum covers
_CHUNK = 20_000  # pairs tokenized at a time


@dataclass(frozen=True)
class Side:
    """The ids of one language; pair i has `tokens[offsets[i]:offsets[i + 1]]`, without begin or end.

    tokens: (tokens,) uint16 or uint32. offsets: (pairs + 1,) int64.
    """

    tokens: np.ndarray
    offsets: np.ndarray

    def __getitem__(self, pair: int) -> np.ndarray:
        ids: np.ndarray = self.tokens[self.offsets[pair] : self.offsets[pair + 1]]
        return ids

    @property
    def lengths(self) -> np.ndarray:
        """The number of pieces of each sentence (pairs,)."""
        return np.diff(self.offsets)


@dataclass(frozen=True)
class Store:
    """Both sides of a corpus; pair i is line i + 1 of its files, empty lines included.

    weights: those of the pairs (pairs,), float32, or None if all are 1. held: an open file that protects the store.
    """

    path: Path
    source: Side
    target: Side
    weights: np.ndarray | None = None
    held: BinaryIO | None = None

    def __len__(self) -> int:
        return len(self.source.offsets) - 1

    def arrays(self) -> Iterator[np.ndarray]:
        """Yield what a checksum covers: all offsets, and the first _CHECKED tokens per side."""
        for side in (self.source, self.target):
            yield from (side.offsets, side.tokens[:_CHECKED])
        if self.weights is not None:
            yield self.weights


class Stores:
    """The training corpora, concatenated: pairs are numbered consecutively through all of them.

    tags: for each corpus, the ids of the pieces to put before each of its sources. weighted: whether pairs have weights.
    """

    def __init__(self, stores: Sequence[Store], tags: Sequence[np.ndarray]) -> None:
        self._stores, self.tags = stores, tags
        self.weighted = any(store.weights is not None for store in stores)
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

    def weight(self, pair: int) -> float:
        """The weight of a pair in the cost."""
        number, line = self.place(pair)
        weights = self._stores[number].weights
        return 1.0 if weights is None else float(weights[line - 1])

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
    def sizes(self) -> list[int]:
        """The number of pairs of each corpus."""
        return list(map(len, self._stores))

    @property
    def paths(self) -> list[Path]:
        return [store.path for store in self._stores]

    def checksum(self) -> str:
        """Return a checksum; equal corpora have equal checksums."""
        arrays = (part for store in self._stores for part in store.arrays())
        return f"{functools.reduce(lambda total, part: zlib.crc32(part.data, total), arrays, 0):08x}"


def open_stores(config: CorpusConfig, vocabulary: Vocabulary, fallback: Path) -> Stores:
    """Open or build the stores of all training corpora, in the cache or, if it cannot be written, in `fallback`.

    Raises UserError as `open_store` does.
    """
    found, folder = config.parts, cache.folder(config.cache)
    for number, part in enumerate(found):
        if not vocabulary.knows(part.tag):
            raise UserError(
                f"{config.label(number)}: tag {part.tag} is unknown to the vocabulary of this run; choose one that it knows"
            )
    stores = [
        open_store(part, config.label(number), vocabulary, (folder, fallback), config.max_ratio)
        for number, part in enumerate(found)
    ]
    with suppress(OSError):  # a folder that cannot be read
        cache.make_room(folder, config.cache_limit * 1e9)
    return Stores(stores, [np.array(vocabulary.encode([part.tag])[0], dtype=np.int64) for part in found])


def open_store(part: CorpusPart, key: str, vocabulary: Vocabulary, folders: Sequence[Path], ratio: float = MAX_RATIO) -> Store:
    """Open the store of a corpus, or build it in the first of `folders` that can be written.

    key: the configuration key of the corpus, for error messages. ratio: as for `read_lines`. Raises UserError if the text is
    invalid or the disk cannot hold the store.
    """
    digest = _digest(part, key, vocabulary)
    name = f"{Path(sides(part.files, key)[0][0]).name}.{digest}{cache.SUFFIX}"
    missing = []
    for folder in folders:
        try:
            return _map(folder / name)
        except FileNotFoundError:
            missing.append(folder)
        except OSError as error:  # it cannot be read
            reason = error
    for folder in missing:
        path = folder / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            building = folder / f".{path.name}.{secrets.token_hex(8)}"
            building.mkdir()  # with the permissions that the umask allows
        except OSError as error:
            reason = error
            continue
        tell(f"nmt-train: tokenizing {key}")  # the log is not open yet
        try:
            _build(building, part, key, vocabulary, ratio)
            _publish(building, path)
        except OSError as error:
            raise UserError(
                f"{path}: {error.strerror or error}; free some space, or set corpus.cache to a folder on another disk"
            ) from None
        finally:
            shutil.rmtree(building, ignore_errors=True)
        return _map(path)
    raise UserError(f"{folders[-1]}: {reason.strerror}; the tokenized corpus needs a writable folder: set corpus.cache")


def _digest(part: CorpusPart, key: str, vocabulary: Vocabulary) -> str:
    facts: list[object] = [_FORMAT, vocabulary.digest]
    weights = part.sentence_weights
    lists = sides(part.files, key)
    if weights is not None:
        facts.append("weights")
        lists += [] if weights == "column" else [[os.path.expanduser(weights)]]
    for paths in lists:
        for path in paths:
            try:
                status = os.stat(path)
            except OSError as error:
                raise UserError(f"{key}: {unreadable(path, error)}; check the path") from None
            facts.append([os.path.abspath(path), status.st_size, status.st_mtime_ns])
        facts.append("side")
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _build(folder: Path, part: CorpusPart, key: str, vocabulary: Vocabulary, ratio: float) -> None:
    pairs = read_pairs(part.files, key, ratio)
    dtype = np.uint16 if len(vocabulary) <= 1 << 16 else np.uint32
    counts = [0, 0]
    with (
        open(folder / "source.tokens", "wb") as source_tokens,
        open(folder / "target.tokens", "wb") as target_tokens,
        open(folder / "source.offsets", "wb") as source_offsets,
        open(folder / "target.offsets", "wb") as target_offsets,
    ):
        outputs = ((source_tokens, source_offsets), (target_tokens, target_offsets))
        for _, offsets in outputs:
            offsets.write(np.zeros(1, np.int64).tobytes())
        total = 0
        for chunk in _chunks(pairs):
            total += len(chunk)
            for side, (tokens, offsets) in enumerate(outputs):
                ids = vocabulary.encode([pair[side] for pair in chunk], side)
                lengths = np.fromiter(map(len, ids), np.int64, len(ids))
                offsets.write((counts[side] + np.cumsum(lengths)).tobytes())
                tokens.write(np.fromiter((i for line in ids for i in line), dtype, int(lengths.sum())).tobytes())
                counts[side] += int(lengths.sum())
    if total == 0 or not all(counts):
        empty = "source" if counts[1] else "target"
        raise UserError(
            f"{key}: the {'files are' if not any(counts) else empty + ' side is'} empty; give files that contain text"
        )
    if part.sentence_weights is not None:
        weights = np.fromiter(read_weights(part, key, ratio), np.float32)
        if len(weights) != total:
            where = f"{key}: sentence_weights: {part.sentence_weights}"
            raise UserError(f"{where} has {len(weights):,} lines, and the corpus {total:,}; give one per pair")
        weights.tofile(folder / "weights")
    (folder / cache.READY).write_text(json.dumps({"pairs": total, "dtype": np.dtype(dtype).name}))


def _chunks(pairs: Iterator[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    while chunk := list(islice(pairs, _CHUNK)):
        yield chunk


def _publish(building: Path, path: Path) -> None:
    """Rename a complete store to its final path; if another run was faster, use its store, which is identical."""
    for file in (*building.iterdir(), building):
        durable.sync(file)
    try:
        building.rename(path)
        durable.sync(path.parent)
    except OSError:
        if not (path / cache.READY).exists():
            raise


def _map(path: Path) -> Store:
    held = cache.hold(path)
    try:
        facts = json.loads(held.read())
        source, target = (
            Side(
                np.memmap(path / f"{name}.tokens", dtype=facts["dtype"], mode="r"),
                np.memmap(path / f"{name}.offsets", dtype=np.int64, mode="r"),
            )
            for name in ("source", "target")
        )
        for side in (source, target):
            if len(side.offsets) != facts["pairs"] + 1 or side.offsets[-1] != len(side.tokens):
                raise ValueError("sizes disagree")
        weights = np.memmap(path / "weights", np.float32, mode="r") if (path / "weights").exists() else None
        if weights is not None and len(weights) != facts["pairs"]:
            raise ValueError("sizes disagree")
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}: damaged ({error}); delete this folder, and the next start rebuilds it") from None
    return Store(path, source, target, weights, held)
