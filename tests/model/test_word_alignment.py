"""Alignments of words from attention between pieces, their form, and their quality."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from alignment_quality import quality
from models import random_model
from torch import Tensor

from nmt_train.corpus.batch import Batch
from nmt_train.corpus.vocabulary import END, Vocabulary
from nmt_train.model.word_alignment import Aligner, Sentence, as_text, hard


class Given(torch.nn.Module):
    """Attends by a function of the places of a target piece and of a source piece."""

    def __init__(self) -> None:
        super().__init__()
        self.parameter = torch.nn.Parameter(torch.zeros(1))

    def guided_attention(self, batch: Batch) -> Tensor:
        rows, columns = batch.target_out.shape[1], batch.source.shape[1]
        weights = torch.rand(len(batch), rows, columns, generator=torch.Generator().manual_seed(rows + columns))
        return weights * (batch.source != 0)[:, None]


def test_a_word_attends_with_the_mean_of_its_pieces_to_the_sum_of_the_pieces_of_a_word(vocabulary: Vocabulary) -> None:
    lines = ["twelve boxes", "zwölf Kisten Milch"]
    source, target = (Sentence(line, np.array(ids)) for line, ids in zip(lines, vocabulary.encode(lines), strict=True))
    (soft,) = Aligner(Given(), vocabulary).soft([source], [target])  # type: ignore[arg-type]
    rows, columns = len(target.ids) + 1, len(source.ids) + 1
    weights = torch.rand(1, rows, columns, generator=torch.Generator().manual_seed(rows + columns))[0]
    starts = [[vocabulary.piece(int(i)).startswith("▁") or i == END for i in [*its.ids, END]] for its in (source, target)]
    left, right = (np.cumsum(its) - 1 for its in starts)
    assert soft.shape == (4, 3)
    for word in range(4):
        for other in range(3):
            block = weights[right == word][:, left == other]
            assert soft[word, other] == pytest.approx(block.sum(1).mean().item(), rel=1e-5)


def test_pieces_attend_with_the_weights_of_the_head(vocabulary: Vocabulary) -> None:
    lines = ["twelve boxes", "zwölf Kisten Milch"]
    source, target = (Sentence(line, np.array(ids)) for line, ids in zip(lines, vocabulary.encode(lines), strict=True))
    (soft,) = Aligner(Given(), vocabulary, pieces=True).soft([source], [target])  # type: ignore[arg-type]
    rows, columns = len(target.ids) + 1, len(source.ids) + 1
    weights = torch.rand(1, rows, columns, generator=torch.Generator().manual_seed(rows + columns))[0]
    np.testing.assert_allclose(soft, weights.numpy())


def test_an_alignment_does_not_depend_on_the_other_pairs_of_a_batch(vocabulary: Vocabulary) -> None:

    model = random_model(len(vocabulary), guided_alignment={"layer": 2})
    lines = ["six", "twelve boxes of milk", "", "We buy seven bags"]
    its = [Sentence(line, np.array(ids, np.int64)) for line, ids in zip(lines, vocabulary.encode(lines), strict=True)]
    together = Aligner(model, vocabulary).soft(its, its[::-1])
    for number, pair in enumerate(zip(its, its[::-1], strict=True)):
        (alone,) = Aligner(model, vocabulary, 1).soft([pair[0]], [pair[1]])
        np.testing.assert_allclose(together[number], alone, atol=1e-6)
        np.testing.assert_allclose(alone.sum(1), 1.0, atol=1e-5)


def test_hard_and_soft_are_printed_as_marian_does() -> None:
    soft = np.array([[0.1, 0.7, 0.2], [0.5, 0.25, 0.25], [0.0, 0.0, 1.0]], np.float32)
    assert hard(soft) == [(0, 1), (1, 0)]
    assert as_text(soft, "hard") == "0-1 1-0"
    assert as_text(soft, "soft") == "0.1,0.7,0.2 0.5,0.25,0.25 0,0,1"
    assert as_text(np.ones((1, 1), np.float32), "hard") == ""


def test_the_quality_is_that_of_och_and_ney_by_hand() -> None:
    """Two pairs: 5 links are made, of which 3 are sure and 1 is only possible; 4 links are sure."""
    found = [{(0, 0), (1, 1), (2, 1)}, {(0, 1), (1, 0)}]
    sure = [{(0, 0), (1, 1)}, {(0, 1), (1, 1)}]
    possible = [{(2, 1)}, set[tuple[int, int]]()]
    found_quality = quality(found, sure, possible)
    assert found_quality.precision == pytest.approx(4 / 5)
    assert found_quality.recall == pytest.approx(3 / 4)
    assert found_quality.error == pytest.approx(1 - (3 + 4) / (5 + 4))


def test_perfect_alignments_have_no_error_and_none_at_all_have_nothing_wrong() -> None:
    links = [{(0, 0)}, {(0, 1), (1, 0)}]
    assert quality(links, links, links) == (1.0, 1.0, 0.0)
    nothing = [set[tuple[int, int]]()]
    assert quality(nothing, nothing, nothing) == (1.0, 1.0, 0.0)
    assert quality(nothing, links[:1], nothing) == (1.0, 0.0, 1.0)
