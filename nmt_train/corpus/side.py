"""The ids of one language in the memory-mapped files of a store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nmt_train.corpus.mapped_file import mapped


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

    def rows(self, pairs: np.ndarray) -> list[np.ndarray]:
        """The ids of several sentences."""
        places = zip(self.offsets[pairs].tolist(), self.offsets[pairs + 1].tolist(), strict=True)
        return [self.tokens[start:end] for start, end in places]

    @property
    def lengths(self) -> np.ndarray:
        """The number of pieces of each sentence (pairs,)."""
        return np.diff(self.offsets)


def side_in(folder: Path, name: str, dtype: str | type[np.generic]) -> Side:
    """The side of this name in the folder of a store. dtype: of its tokens."""
    return Side(mapped(folder / f"{name}.tokens", dtype), mapped(folder / f"{name}.offsets", np.int64))
