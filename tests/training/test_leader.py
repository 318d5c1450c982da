"""What rank 0 decides between two steps, told by its recorded worker and by the other ranks' end of the protocol."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from functools import partial
from itertools import chain, repeat
from pathlib import Path

import pytest
from led import COUNTED, Led

from nmt_train.common.errors import UserError
from nmt_train.corpus.data_shard import Position
from nmt_train.run.stopping import Verdict
from nmt_train.training.snapshot import RankState
from nmt_train.transport import Tag

Lead = Callable[..., Led]
SNAPSHOT = ["order drain", "drain", "await the writing", "order hand over", "prepare snapshot", "copy its part"]
VALIDATED = [*SNAPSHOT[:-1], "request a validation", "copy its part"]
END = ["finish validations", "await the writing", "order end"]


@pytest.fixture
def lead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lead:
    return partial(Led, tmp_path, monkeypatch)


def test_every_rank_has_its_part_before_any_goes_on_and_the_parameters_before_any_trains(lead: Lead) -> None:
    led = lead(started=False)
    assert led.did == ["load [0.0, 1.0]", "order continue", "resume", "begun"]
    assert not led.waits, "it has waited for the other rank twice"
    arrived = iter(lambda: led.others[0].receive(0, Tag.STATE).result()[1], None)
    assert json.loads(next(arrived).tensors[0].numpy().tobytes()) == {"stages": [], "workers": 2, "epochs": 0}
    assert RankState.receive(lambda: next(arrived)).shard["parameters"].tolist() == [2.0, 3.0]


def test_a_due_checkpoint_stops_all_ranks_at_one_moment_and_is_written_while_they_train(lead: Lead) -> None:
    led = lead(checkpoints=[2])
    assert led.step()
    assert led.did == []
    assert led.step()
    assert led.did == [*SNAPSHOT, "order continue", "finish validations", "write 2"]


def test_no_rank_hands_over_before_the_last_has_drained_or_goes_on_before_the_last_has_handed_over(lead: Lead) -> None:
    led, there = lead(ranks=3, checkpoints=[1]), "the last rank is there"
    last = led.others[1]

    def meet() -> None:
        led.did.append(there)
        last.report(met=True)

    last.punctual = False
    led.waits.extend([meet, meet])
    led.step()
    assert led.did[:9] == [*SNAPSHOT[:2], there, *SNAPSHOT[2:], there, "order continue"]
    assert last.did[-3:] == ["order drain", "order hand over", "order continue"]


def test_the_final_state_is_collected_and_written_once_and_then_all_ranks_end(lead: Lead) -> None:
    led = lead(stop="2u", checkpoints=[2], validate="9u")
    assert [led.step() for _ in range(3)] == [True, True, False]
    assert led.did == [*VALIDATED, "finish validations", "write 2", *END]
    assert led.leader.reason == "stop.after 2u reached"


@pytest.mark.parametrize("written", [True, False])
def test_a_run_that_is_over_when_it_begins_writes_only_what_no_checkpoint_holds(lead: Lead, written: bool) -> None:
    led = lead(stop="1u", started=False, checkpoint=1 if written else None)
    led.did.clear()
    led.state.progress.updates = led.worker.strategy.updates = 1
    led.leader.start_first_batch(recovered=False)
    assert not led.step()
    assert led.did == [*SNAPSHOT, END[0], *["write 1"] * (not written), *END[1:]]


def test_a_validation_that_a_signal_postponed_comes_before_the_first_batch(lead: Lead) -> None:
    led = lead(started=False)
    led.did.clear()
    led.state.validation_pending = True
    led.leader.start_first_batch(recovered=False)
    assert led.did == [*VALIDATED, "order continue", "finish validations", "write 0", "order continue"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_stops_training_at_the_next_step_whichever_rank_received_it(lead: Lead, rank: int) -> None:
    led = lead(validate="9u")
    if rank:
        led.others[0].report(signal=signal.SIGINT)
        assert led.step(updated=False)
    led.leader.ask(signal.SIGTERM)
    assert led.step(updated=False)
    assert not led.step()
    assert led.leader.reason == ("SIGINT received" if rank else "SIGTERM received"), "the first one counts"
    assert led.did == [*SNAPSHOT, "finish validations", "write 0", *END[1:]], "no validation delays the end"


def test_in_step_a_signal_stops_training_at_the_next_update(lead: Lead) -> None:
    led = lead(synchronous=True, validate="9u")
    led.leader.ask(signal.SIGTERM)
    assert led.step(updated=False)
    led.others[0].report(exchanged=True)
    assert led.step()
    assert not led.step()
    assert led.did == ["order step", "order step", *SNAPSHOT, "finish validations", "write 1", *END]


def test_a_single_rank_completes_its_update_before_a_signal_stops_it(lead: Lead) -> None:
    led = lead(ranks=1)
    led.leader.ask(signal.SIGTERM)
    for led.worker.strategy.mid_series in (True, False):
        assert led.step(updated=False)
    assert not led.step()


def test_in_step_it_decides_once_all_others_have_reported_this_exchange(lead: Lead) -> None:
    led = lead(ranks=3, synchronous=True)
    for received in (0, signal.SIGTERM):
        led.others[0].report(exchanged=True)
        led.waits.append(partial(led.others[1].report, exchanged=True, signal=received))
        assert led.step()
        assert not led.waits
        assert bool(led.leader.reason) == bool(received)


def test_in_step_a_series_of_local_steps_is_one_order(lead: Lead) -> None:
    led = lead(synchronous=True)
    for led.worker.strategy.mid_series in (False, True, True, False):
        led.step(updated=False)
    assert led.did == ["order step", "order step"]


def test_a_validation_is_requested_when_its_interval_is_crossed_and_stops_no_rank(lead: Lead) -> None:
    led = lead(validate="2u")
    for _ in range(5):
        led.step()
    assert led.did == ["request a validation"] * 2


@pytest.mark.parametrize("score", [0.5, 2.0])
def test_a_new_best_of_the_final_state_lets_the_ranks_that_wait_train_on(lead: Lead, score: float) -> None:
    led = lead(validate="1u", patience=2)
    led.state.patience.verdicts = {"bleu": Verdict(1.0, 1)}
    scores = chain([0.5], repeat(score))
    led.validation.judge = lambda: led.state.patience.record({"bleu": next(scores)})
    led.validation.lasts = True
    led.step()
    led.validation.lasts = False
    led.step()
    saved = [*VALIDATED, "finish validations", "write 2"]
    assert led.did == ["request a validation", *saved, *["order continue"] * (score > 1)]
    assert led.step() == (score > 1)
    assert led.did.count("order end") == (score < 1)


@pytest.mark.parametrize("lasts", [False, True])
def test_a_validation_that_ends_the_patience_ends_training(lead: Lead, lasts: bool) -> None:
    led = lead(validate="1u", patience=1)
    led.state.patience.verdicts = {"bleu": Verdict(1.0, 0)}
    led.validation.judge, led.validation.lasts = lambda: led.state.patience.record({"bleu": 0.5}), lasts
    assert led.step()
    if lasts:
        led.validation.lasts = False
        assert led.step(updated=False)
    assert not led.step()
    assert led.leader.reason == "no new best in 1 validation (stop.patience)"


def test_survivors_are_told_the_state_at_intervals_and_after_checkpoints_and_validations(lead: Lead) -> None:
    led, told = lead(recovery="3u", checkpoints=[2], validate="5u"), []
    led.others[0].report(0, 4, updates=7)
    for _ in range(5):
        before = len(led.did)
        led.step()
        told.append("order remember" in led.did[before:])
    assert told == [False, True, True, False, True]
    leader = led.others[0].facts[-1]["leader"]
    assert (leader["updates"], leader["progress"]["updates"], leader["positions"]) == (7, 5, [[0, 0], [0, 4]])


def test_where_nobody_could_survive_no_state_is_sent(lead: Lead) -> None:
    led = lead(checkpoints=[1], validate="2u")
    assert all(led.step() for _ in range(3))
    assert "order remember" not in led.did


@pytest.mark.parametrize("wait", [False, True])
def test_batches_are_redistributed_if_a_worker_is_far_behind_unless_workers_wait_anyway(lead: Lead, wait: bool) -> None:
    led = lead(workers_wait=wait)
    led.others[0].report(0, 3)
    led.worker.position = Position(2, 1)
    led.leader.step_done(updated=True)
    assert led.did == [*["order redistribute", "drain", "train as one of 2", "order continue"] * (not wait)]
    assert wait or led.others[0].facts[-1] == {"workers": 2, "stages": [[[2, 1], [0, 3]]], "leader": None}


def test_it_waits_for_a_slower_worker_and_tells_all_when_an_epoch_is_over(lead: Lead) -> None:
    led = lead(workers_wait=True)
    led.worker.position = Position(2, 0)
    led.waits.extend([lambda: led.others[0].report(0, 5), lambda: led.others[0].report(1, 0)])
    assert led.leader.should_continue()
    assert led.did == ["pause", "pause", "order epochs"]
    assert led.others[0].facts[-1] == {"epochs": 1}


def test_more_workers_join_with_a_checkpoint_from_where_the_others_are(lead: Lead) -> None:
    led = lead(ranks=3, waves="{2: 0u, 3: 2u}")
    led.others[0].report(0, 4)
    led.step()
    assert led.did == []
    led.step()
    assert led.did == [*SNAPSHOT, "train as one of 3", "order continue", "finish validations", "write 2"]
    assert led.others[1].facts[-2:] == [{"workers": 3}, {"workers": 3, "stages": [[[0, 0], [0, 4]]], "leader": None}]
    assert "3 workers train from now on" in led.log.getvalue()


def test_what_other_ranks_report_is_counted_logged_and_traced(lead: Lead, tmp_path: Path) -> None:
    led = lead(ranks=3)
    led.worker.position = Position(0, 2)
    led.others[0].report(0, 3, counted=COUNTED | {"tokens": 40, "cost": 2.5}, said="skipped: batch 7")
    led.others[1].report(0, 4, counted=COUNTED | {"tokens": 2}, spans=[["forward", "MainThread", 0.5, 1.5, 3]])
    led.step(updated=False)
    progress = led.state.progress
    assert (progress.tokens, progress.cost, progress.epochs, progress.batches) == (42, 2.5, 0, 9)
    assert led.log.getvalue().endswith("] skipped: batch 7\n")
    assert json.loads((tmp_path / "trace" / "rank2.jsonl").read_text())["name"] == "forward"


def test_a_run_that_skips_every_batch_ends_too(lead: Lead) -> None:
    led = lead(ranks=1, stop="1e")
    led.worker.position = Position(1, 0)
    assert led.step(updated=False)
    led.leader.skipped("skipped: batch 7")
    assert led.step(updated=False)
    assert led.leader.reason == "stop.after 1e reached"
    assert led.log.getvalue().endswith("] skipped: batch 7\n")


def test_an_error_that_ends_training_is_not_replaced_by_one_of_the_checkpoint(lead: Lead) -> None:
    led = lead()

    def full(wait: bool) -> None:
        led.did.append("await the writing")
        raise UserError("No space left on device")

    led.writer.advance = full  # type: ignore[assignment]
    led.leader.complete_checkpoint()
    assert led.did == ["await the writing"]
