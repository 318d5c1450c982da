"""Guided alignment: adds to a batch which source pieces the guided attention head should attend to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from nmt_train.corpus.batch import Batch
from nmt_train.corpus.store import Stores
from nmt_train.corpus.vocabulary import SOURCE, TARGET, Vocabulary
from nmt_train.corpus.whole_words import WholeWords


class Guidance:
    """The word alignments of the stores' pairs, for batches."""

    def __init__(self, stores: Stores, vocabulary: Vocabulary) -> None:
        self._stores, self._words = stores, WholeWords(vocabulary)

    def added(self, batch: Batch, source: Sequence[np.ndarray], target: Sequence[np.ndarray]) -> Batch:
        """The batch with its `links` and `link_shares`, if it has any.

        source, target: the ids that the batch was made of. A piece of a linked target word should attend equally to all pieces
        of the source words that it is linked with (Garg et al. 2019); these shares are multiplied by the sentence's weight.
        """
        length, width = batch.target_out.shape[1], batch.source.shape[1]
        weights = np.ones(len(batch)) if batch.weights is None else batch.weights.numpy()
        places, shares = [], []
        for row, (pair, *sides) in enumerate(zip(batch.pairs, source, target, strict=True)):
            linked = self._linked(pair, *sides)
            at, of = linked.nonzero()
            places.append((row * length + at) * width + of)
            shares.append(weights[row] / linked.sum(1)[at])
        if not any(map(len, places)):
            return batch
        links, link_shares = torch.from_numpy(np.concatenate(places)), torch.from_numpy(np.concatenate(shares)).float()
        return replace(batch, links=links, link_shares=link_shares)

    def _linked(self, pair: int, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Whether each piece of the target is linked with each piece of the source; bool (target pieces, source pieces)."""
        of_source, of_target = self._words.of_ids(source, SOURCE), self._words.of_ids(target, TARGET)
        words = of_source[-1] + 1, of_target[-1] + 1
        links = self._stores.links(pair)
        if len(tag := self._stores.tag(pair)):
            links[:, 0] += self._words.of_ids(tag, SOURCE)[-1] + 1
        links = links[(links < words).all(1)]  # noise may have removed words at the end
        linked = np.zeros(words, dtype=bool)
        linked[links[:, 0], links[:, 1]] = True
        pieces: np.ndarray = linked[of_source][:, of_target].T
        return pieces
