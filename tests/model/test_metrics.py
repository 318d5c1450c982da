"""Metrics of translations against sacreBLEU's own functions, or counted by hand."""

from __future__ import annotations

import pytest
import sacrebleu

from nmt_train.common.metric import METRICS
from nmt_train.model.bleu import scorer

TRANSLATIONS = ["the cat sat on the mat", "a dog runs", "two birds  sing"]
REFERENCES = ["the cat is on the mat", "a dog runs ", "two birds sing"]


def score(metric: str, tokenizer: str = "13a") -> float:
    return float(scorer(metric, tokenizer).corpus_score(TRANSLATIONS, [REFERENCES]).score)


def test_bleu_chrf_and_ter_are_those_of_sacrebleu() -> None:
    assert score("bleu") == sacrebleu.corpus_bleu(TRANSLATIONS, [REFERENCES]).score
    assert score("chrf") == sacrebleu.corpus_chrf(TRANSLATIONS, [REFERENCES]).score
    assert score("chrf++") == sacrebleu.corpus_chrf(TRANSLATIONS, [REFERENCES], word_order=2).score
    assert score("ter") == sacrebleu.corpus_ter(TRANSLATIONS, [REFERENCES]).score == pytest.approx(100 * 1 / 12)


def test_an_exact_match_may_differ_in_spaces_only() -> None:
    assert score("exact-match") == pytest.approx(100 * 2 / 3)
    judge = scorer("exact-match", references=["a b", "c"])
    assert judge.corpus_score(["a b", "C"], None).score == 50.0
    assert str(judge.get_signature()) == f"nrefs:1|version:{sacrebleu.__version__}"


def test_ter_counts_characters_of_a_text_without_spaces() -> None:
    judge = scorer("ter", "zh")
    assert judge.corpus_score(["我喜欢红茶"], [["我喜欢绿茶"]]).score == pytest.approx(100 / 5)
    assert "norm:yes|punct:yes|asian:yes" in str(judge.get_signature())


@pytest.mark.parametrize("metric", [name for name, metric in METRICS.items() if metric.translated])
def test_translations_equal_to_their_references_have_the_best_score(metric: str) -> None:
    found = scorer(metric).corpus_score(REFERENCES, [REFERENCES]).score
    assert found == pytest.approx(0.0 if METRICS[metric].lower_is_better else 100.0)
