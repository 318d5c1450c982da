"""What a rank other than rank 0 does with each order, told by rank 0's end of the protocol."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest
from memory import MemoryTransport, transports

from nmt_train.corpus.data_shard import DataShard, Position
from nmt_train.training.control import Order, Orders, Report
from nmt_train.training.follower import Follower


class Recorded:
    """A worker that writes down what it is told. idle: it has not joined yet."""

    def __init__(self, transport: MemoryTransport, synchronous: bool, idle: bool) -> None:
        self.transport, self.did = transport, list[str]()
        self.plan = SimpleNamespace(synchronous=synchronous)
        self.config = SimpleNamespace(trace=False)
        self.trace = SimpleNamespace(take=lambda: ())
        self.data_shard = DataShard(1, 1 if idle else 2)
        self.position = self.settled_position = Position(0, 3)
        self.progress = SimpleNamespace(take=lambda: dict.fromkeys(("sentences", "tokens", "source_tokens", "skipped",
                                                                    "cost_tokens"), 0) | {"cost": 0.0})  # fmt: skip
        self.strategy = SimpleNamespace(
            mid_series=False, updates=7, refresh=lambda: self.did.append("refresh"),
            prepare_snapshot=lambda: self.did.append("prepare snapshot"),
        )  # fmt: skip

    def measured(self) -> dict[str, Any]:
        return {}

    def part(self) -> None:
        self.did.append("copy its part")

    def drain(self, follower: Follower) -> None:
        self.did.append("drain")

    def pause(self, follower: Follower) -> None:
        self.did.append("pause")

    def decay(self, epochs: float) -> None:
        self.did.append(f"decay {epochs}")

    def assign(self, data_shard: DataShard, position: Position) -> None:
        self.did.append(f"train as one of {data_shard.size}")
        self.data_shard = data_shard

    def too_far_ahead(self, slowest: int) -> bool:
        return self.position.epochs > slowest + 1


class Pair:
    """Rank 0's orders, and the follower that obeys them; orders are given before the follower looks for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, synchronous: bool = False, idle: bool = False) -> None:
        leader, other = transports([0, 1])
        monkeypatch.setattr("nmt_train.training.follower.hand_over", lambda transport, part: None)
        self.orders, self.worker = Orders(leader), Recorded(other, synchronous, idle)
        self.follower = Follower(self.worker)  # type: ignore[arg-type]

    def after(self, *orders: Order | tuple[Order, dict[str, Any]]) -> bool:
        """Whether the follower takes another step after these orders."""
        for order in orders:
            kind, facts = order if isinstance(order, tuple) else (order, {})
            self.orders.give(kind, **facts)
        return self.follower.should_continue()

    def reports(self) -> list[Report]:
        found = []
        while self.orders.has_report():
            found.append(self.orders.report()[1])
        return found


def test_it_trains_without_an_order_where_workers_need_not_be_in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Pair(monkeypatch).after()


def test_in_step_every_order_is_for_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch, synchronous=True)
    assert pair.after(Order.STEP, Order.STEP)
    assert pair.after()
    assert not pair.after(Order.END)


def test_in_step_a_series_of_local_steps_needs_no_further_order(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch, synchronous=True)
    assert pair.after(Order.STEP)
    pair.worker.strategy.mid_series = True
    assert pair.after()


def test_for_a_snapshot_it_drains_hands_over_and_trains_on_only_when_all_have(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch)
    assert pair.after(Order.DRAIN, (Order.HAND_OVER, {"workers": 2}), Order.CONTINUE)
    assert pair.worker.did == ["drain", "prepare snapshot", "copy its part"]
    assert [report.met for report in pair.reports()] == [True, True]


def test_a_worker_that_joins_pulls_the_parameters_before_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch, idle=True)
    stages = {"workers": 2, "stages": [], "leader": None}
    assert pair.after(Order.DRAIN, (Order.HAND_OVER, {"workers": 2}), (Order.CONTINUE, stages))
    assert pair.worker.did == ["drain", "refresh", "copy its part", "train as one of 2"]


def test_a_worker_that_has_not_joined_only_obeys_and_knows_how_far_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch, idle=True)
    assert not pair.after((Order.EPOCHS, {"epochs": 2}), Order.END)
    assert pair.worker.did == ["decay 2"]


def test_a_worker_that_is_far_ahead_pauses_until_the_slowest_has_caught_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch)
    pair.worker.position, epochs = Position(3, 0), iter((1, 2))

    def pause(follower: Follower) -> None:
        pair.worker.did.append("pause")
        pair.orders.give(Order.EPOCHS, epochs=next(epochs))

    pair.worker.pause = pause  # type: ignore[method-assign]
    assert pair.after()
    assert pair.worker.did == ["pause", "pause"]
    assert len(pair.reports()) == 2, "rank 0 learns that it waits"


def test_it_reports_an_exchange_the_end_of_an_epoch_a_signal_and_what_it_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch)
    pair.follower.step_done(updated=False)
    assert pair.reports() == []
    pair.follower.step_done(updated=True)
    pair.follower.skipped("skipped: batch 7")
    pair.follower.ask(signal.SIGTERM)
    pair.follower.step_done(updated=False)
    found = pair.reports()
    assert [report.exchanged for report in found] == [True, False, False]
    assert [report.said for report in found] == ["", "skipped: batch 7", ""]
    assert [report.signal for report in found] == [0, 0, signal.SIGTERM]
    assert {(report.position.batches, report.updates) for report in found} == {(3, 7)}
