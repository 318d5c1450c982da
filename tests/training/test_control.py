"""Orders and reports: what arrives is what was sent, in few bytes; and what rank 0 concludes from the positions in reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from virtual import engine, together

from nmt_train.common.message import Message
from nmt_train.corpus.data_shard import Position
from nmt_train.run.progress import Progress
from nmt_train.simulation.virtual_transport import VirtualTransport
from nmt_train.training.control import Order, Orders, Report, Reports
from nmt_train.training.data_balance import DataBalancer
from nmt_train.training.rank_stats import Totals
from nmt_train.transport import Tag
from nmt_train.transport.mpi.framing import pack

COUNTED = {"sentences": 30, "tokens": 700, "source_tokens": 650, "skipped": 1, "cost": 0.1 + 0.2, "cost_tokens": 700}
MEASURED = {
    "sent": {"push": [3, 4000], "report": [1, 90]},
    "spent": {"MainThread": {"forward": 0.7, "backward": 2.0}, "background": {}},
    "staleness": {},
    "steps": {1: 5},
}
REPORT = Report(COUNTED, Position(2, 7), Position(2, 5), 41, Totals.of(MEASURED))


def reported(*reports: Report) -> list[Report]:
    """What arrives at rank 0 if rank 1 sends these reports, one after the other."""

    def leader(transport: VirtualTransport) -> list[Report]:
        orders = Orders(transport)
        return [orders.report()[1] for _ in reports]

    def follower(transport: VirtualTransport) -> None:
        sender = Reports(transport)
        for report in reports:
            sender.send(report)

    return together(engine([1, 1]), leader, follower)[0]


def test_a_report_arrives_as_it_was_sent() -> None:
    more = REPORT._replace(met=True, exchanged=True, signal=15, said="skipped", spans=[["forward", "MainThread", 0.5, 1.5, 3]])
    assert reported(REPORT, more, REPORT) == [REPORT, more, REPORT]
    assert REPORT.totals.nested() == MEASURED | {"steps": {"1": 5}}


def test_totals_that_appear_later_arrive_and_whole_numbers_stay_whole() -> None:
    grown = MEASURED | {"staleness": {0: 4, 3: 1}, "steps": {1: 6, 2: 1}}
    arrived = reported(REPORT, REPORT._replace(totals=Totals.of(grown)), REPORT._replace(totals=Totals.of(grown)))
    expected = repr(grown | {"staleness": {"0": 4, "3": 1}, "steps": {"1": 6, "2": 1}})
    assert [repr(report.totals.nested()) for report in arrived[1:]] == [expected, expected]


def test_only_the_first_report_names_its_totals() -> None:
    first, next_ones = REPORT.pack(Totals.of({})), REPORT.pack(REPORT.totals)
    assert b"forward" in pack(Tag.REPORT, 0, first).tobytes()
    numbers = 4 + 13 + 5 + 2 + 3  # of the frame, of a report, whole totals, type and length of the vector, and its elements
    assert pack(Tag.REPORT, 0, next_ones).nbytes == 8 * numbers


def test_an_order_without_facts_is_a_number() -> None:
    def leader(transport: VirtualTransport) -> None:
        orders = Orders(transport)
        orders.give(Order.STEP)
        orders.give(Order.EPOCHS, epochs=3)

    def listener(transport: VirtualTransport) -> list[Message]:
        return [transport.receive(0, Tag.CONTROL).result()[1] for _ in range(2)]

    def follower(transport: VirtualTransport) -> list[tuple[Order, dict[str, Any]]]:
        reports = Reports(transport)
        return [reports.order(), reports.order()]

    _, raw, read = together(engine([1, 1, 1]), leader, listener, follower)
    assert [message.bytes for message in raw] == [0, len('{"epochs": 3}')]
    assert read == [(Order.STEP, {}), (Order.EPOCHS, {"epochs": 3})]


def leading(ranks: int) -> Any:
    """The worker of rank 0, as far as its position in the data is concerned."""
    return SimpleNamespace(transport=SimpleNamespace(size=ranks), config=None, position=Position())


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 5)), max_size=30))
def test_the_position_of_a_run_is_that_of_its_slowest_workers(moves: list[tuple[int, int, int]]) -> None:
    worker, progress = leading(4), Progress()
    balance = DataBalancer(worker, progress)
    for rank, epochs, batches in moves:
        if rank:
            balance.heard(rank, Position(epochs, batches), Position(), 0)
        else:
            worker.position = Position(epochs, batches)
        before = progress.epochs
        ended = balance.count()
        slowest = min(position.epochs for position in balance.positions)
        assert (progress.epochs, ended) == (slowest, slowest > before)
        assert progress.batches == sum(position.batches for position in balance.positions if position.epochs == slowest)


def test_a_report_of_one_worker_costs_rank_0_no_look_at_the_others() -> None:
    looks = [0]

    class Watched(Position):
        def __getattribute__(self, name: str) -> Any:
            looks[0] += 1
            return super().__getattribute__(name)

    costs = []
    for ranks in (4, 400):
        balance = DataBalancer(leading(ranks), Progress())
        for rank in range(1, ranks):
            balance.heard(rank, Watched(0, 1), Watched(0, 1), 1)
        looks[0] = 0
        balance.heard(1, Watched(0, 2), Watched(0, 1), 2)
        balance.count()
        costs.append(looks[0])
    assert costs[0] == costs[1] > 0
