from __future__ import annotations

import pytest

from nmt_train.common.duration import Duration
from nmt_train.run.progress import Progress
from nmt_train.run.stopping import Patience, StopConfig


def patience(**options: object) -> Patience:
    return Patience(StopConfig(after=[Duration.parse("1e")], **options))  # type: ignore[arg-type]


def test_cross_entropy_and_perplexity_improve_downwards_bleu_and_chrf_upwards() -> None:
    judge = patience()
    judge.record({"cross-entropy": 2.0, "perplexity": 7.0, "bleu": 10.0, "chrf": 30.0})
    verdicts = judge.record({"cross-entropy": 1.5, "perplexity": 8.0, "bleu": 11.0, "chrf": 30.0})
    assert {metric: verdict.stalled for metric, verdict in verdicts.items()} == {
        "cross-entropy": 0, "perplexity": 1, "bleu": 0, "chrf": 1,
    }  # fmt: skip
    assert verdicts["perplexity"].best == 7.0


@pytest.mark.parametrize(("when", "stops_at"), [("any", 3), ("all", 5)])
def test_training_stops_when_any_or_all_metrics_ran_out_of_patience(when: str, stops_at: int) -> None:
    judge = patience(patience=2, patience_on=when)
    bleu = [10.0, 9.0, 9.0, 9.0, 9.0]
    entropy = [3.0, 2.9, 2.8, 3.5, 3.5]
    exhausted = []
    for values in zip(entropy, bleu, strict=True):
        judge.record(dict(zip(("cross-entropy", "bleu"), values, strict=True)))
        exhausted.append(judge.reason is not None)
    assert exhausted.index(True) + 1 == stops_at


def test_no_patience_means_never() -> None:
    judge = patience()
    for _ in range(50):
        judge.record({"bleu": 1.0})
    assert judge.reason is None


def test_patience_survives_a_restart() -> None:
    first = patience(patience=3)
    for value in (5.0, 4.0, 4.0):
        first.record({"bleu": value})
    second = patience(patience=3)
    second.load(first.state())
    assert second.reason is None
    second.record({"bleu": 4.5})
    assert second.reason == "no new best in 3 validations (stop.patience)"


def test_a_metric_that_is_no_longer_measured_cannot_hold_training_up() -> None:
    judge = patience(patience=1)
    judge.record({"bleu": 1.0, "chrf": 1.0})
    judge.record({"bleu": 1.0})
    assert judge.reason is not None


def test_patience_counts_again_in_every_stage_and_ends_only_the_last() -> None:
    judge = Patience(StopConfig(after=["9e"], patience=2), last_stage=1)  # type: ignore[list-item]
    for _ in range(4):
        judge.record({"bleu": 1.0}, stage=0)
    assert judge.reason is None, "it is not the last stage"
    judge.record({"bleu": 1.0}, stage=1)
    assert judge.reason is None, "the count began again"
    again = Patience(StopConfig(after=["9e"], patience=2), last_stage=1)  # type: ignore[list-item]
    again.load(judge.state())
    again.record({"bleu": 1.0}, stage=1)
    assert again.reason is not None


@pytest.mark.parametrize(
    ("after", "progress", "said"),
    [
        (["8e", "4m"], Progress(epochs=1, batches=3, sentences=40), "1.4 of 8 epochs"),
        (["8e", "4m"], Progress(epochs=7, batches=9, sentences=99), "7.9 of 8 epochs"),
        (["8e", "4m"], Progress(epochs=8), ""),
        (["1e"], Progress(epochs=0, batches=1, sentences=4), "0.04 of 1 epoch"),
        (["2h", "1840u"], Progress(updates=267), "267 of 1,840 updates"),
        (["10e", "300Kt"], Progress(epochs=2, tokens=250_000), "250,000 of 300,000 words"),
        (["10e", "300Kt"], Progress(epochs=9, tokens=250_000), "9 of 10 epochs"),
        (["10e", "300Kt"], Progress(epochs=2, tokens=300_000), ""),
        (["2h"], Progress(epochs=2), ""),
    ],
)
def test_a_run_that_ends_early_says_how_far_it_has_come(after: list[str], progress: Progress, said: str) -> None:
    assert StopConfig(after=[Duration.parse(text) for text in after]).unfinished(progress, pairs=100) == said
