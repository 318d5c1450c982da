"""Tokenizes a corpus into the files of a store."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from nmt_train.common.errors import UserError
from nmt_train.common.section import as_list
from nmt_train.corpus import CorpusPart, cache
from nmt_train.corpus.alignment import described
from nmt_train.corpus.pass_bar import PassBar
from nmt_train.corpus.side import side_in
from nmt_train.corpus.text import read_pairs, refuse_empty, weights_of
from nmt_train.corpus.tokenizing import cores, tokenized
from nmt_train.corpus.unknown import UnknownCharacters
from nmt_train.corpus.vocabulary import Vocabulary
from nmt_train.corpus.whole_words import links_of_ids

Item = TypeVar("Item")

_CHUNK = 20_000  # pairs tokenized at a time
_MANY = 100_000  # pairs from which on several processes tokenize: each takes half a second to begin


class _Output:
    """A file of a store that is being built, and the checksum of what was written to it."""

    def __init__(self, path: Path) -> None:
        self._file, self.checksum = open(path, "wb"), hashlib.sha256()

    def write(self, array: np.ndarray) -> None:
        data = array.tobytes()
        self._file.write(data)
        self.checksum.update(data)

    def close(self) -> None:
        self._file.close()


def build_store(
    folder: Path, part: CorpusPart, key: str, vocabulary: Vocabulary, ratio: float, pairs: int | None = None
) -> None:
    """Fill the folder of a store (see store.py).

    key: of the corpus, for error messages. pairs: their number, if it is known; many are tokenized in several processes.
    """
    dtype = np.dtype(np.uint16 if max(as_list(vocabulary.size)) <= 1 << 16 else np.uint32)
    counts, total, unknown = [0, 0], 0, UnknownCharacters()
    outputs = [_Output(folder / f"{side}.{kind}") for side in ("source", "target") for kind in ("tokens", "offsets")]
    with ExitStack() as opened:
        for output in outputs:
            opened.callback(output.close)
        for offsets in outputs[1::2]:
            offsets.write(np.zeros(1, np.int64))
        bar = opened.enter_context(PassBar(f"tokenizing {key}", pairs))
        processes = cores() if pairs is not None and pairs >= _MANY and cores() > 1 else 0
        for sides in tokenized(vocabulary, _chunks(read_pairs(part.files, key, ratio)), dtype, processes):
            for side, (tokens, offsets) in enumerate((outputs[:2], outputs[2:])):
                lengths, ids, lacking = sides[side]
                unknown.merge(lacking)
                offsets.write(counts[side] + np.cumsum(lengths))
                tokens.write(ids)
                counts[side] += len(ids)
            total += len(sides[0].lengths)
            bar.advance(len(sides[0].lengths))
    refuse_empty(key, *map(bool, counts))
    if part.sentence_weights is not None:
        weights = weights_of(part, key, total, ratio)
        outputs.append(_Output(folder / "weights"))
        outputs[-1].write(weights)
        outputs[-1].close()
    if part.alignments is not None:
        outputs += _write_links(folder, part, key, vocabulary, ratio, dtype.type)
    checksum = hashlib.sha256("".join(output.checksum.hexdigest() for output in outputs).encode()).hexdigest()[:16]
    facts = {"pairs": total, "dtype": dtype.name, "checksum": checksum, "unknown": unknown.facts}
    (folder / cache.READY).write_text(json.dumps(facts))


def _write_links(
    folder: Path, part: CorpusPart, key: str, vocabulary: Vocabulary, ratio: float, dtype: type[np.generic]
) -> list[_Output]:
    """Add the links of all pairs to a store that has their tokens."""
    source, target = (side_in(folder, name, dtype) for name in ("source", "target"))
    ids = ((source[pair], target[pair]) for pair in range(len(source.offsets) - 1))
    count, tokens, offsets = 0, _Output(folder / "links.tokens"), _Output(folder / "links.offsets")
    with closing(tokens), closing(offsets):
        offsets.write(np.zeros(1, np.int64))
        for chunk in _chunks(links_of_ids(part, key, vocabulary, ids, ratio)):
            offsets.write(count + np.cumsum([links.size for links in chunk], dtype=np.int64))
            tokens.write(np.concatenate(chunk).astype(np.uint32))
            count += sum(links.size for links in chunk)
    if not count:
        raise UserError(f"{described(part, key)} has no links; give the word alignments of the corpus, or remove the key")
    return [tokens, offsets]


def _chunks(items: Iterator[Item]) -> Iterator[list[Item]]:
    while chunk := list(islice(items, _CHUNK)):
        yield chunk
