from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmt_train.common.duration import Duration, Mark, Pace


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [("10e", 10, "e"), ("500u", 500, "u"), ("300Kt", 300_000, "t"), ("1.5Mt", 1_500_000, "t"), ("1Gt", 1e9, "t"),
     ("2h", 7200, "h"), ("30m", 1800, "m"), ("90s", 90, "s"), ("0.5h", 1800, "h"),
     ("4.1Mt", 4_100_000, "t"), ("33.3Mt", 33_300_000, "t"), ("1.005Ku", 1005, "u")],
)  # fmt: skip
def test_durations_are_written_as_in_marian(text: str, amount: float, unit: str) -> None:
    span = Duration.parse(text)
    assert (span.amount, span.unit, str(span)) == (amount, unit, text)


@pytest.mark.parametrize("text", ["10", "", "u", "-5u", "0u", "1.5u", "0.5e", "10x", "10 u", None, True])
def test_anything_else_is_refused_with_a_reason(text: object) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        Duration.parse(text)


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 50))
def test_an_interval_fires_once_for_each_multiple_it_crosses_however_progress_comes(steps: list[int], every: int) -> None:
    span, updates, fired = Duration.parse(f"{every}u"), 0, 0
    for step in steps:
        before, after = Mark(0, updates, 0, 0.0), Mark(0, updates + step, 0, 0.0)
        crossed = (updates + step) // every - updates // every
        assert span.crossed(before, after) == (crossed > 0)
        fired += crossed
        updates += step
    assert fired == updates // every


def test_reached_counts_in_the_unit_of_the_duration() -> None:
    mark = Mark(epochs=2, updates=100, tokens=5000, seconds=60.0)
    assert all(Duration.parse(text).reached(mark) for text in ("2e", "100u", "5Kt", "1m", "60s"))
    assert not any(Duration.parse(text).reached(mark) for text in ("3e", "101u", "6Kt", "2m", "1h"))


def test_a_time_is_lengthened_to_twenty_times_what_the_last_one_took() -> None:
    pace = Pace(Duration.parse("10s"), Mark(0, 0, 0, 0.0))
    due = [pace.due(Mark(0, 0, 0, float(second))) for second in range(25)]
    assert [second for second, now in enumerate(due) if now] == [10]  # it is not over yet
    pace.took(3.0)
    assert [second for second in range(25, 100) if pace.due(Mark(0, 0, 0, float(second)))] == [70]


def test_an_interval_in_updates_is_kept_whatever_it_takes() -> None:
    pace = Pace(Duration.parse("10u"), Mark(0, 0, 0, 0.0))
    assert [update for update in range(35) if pace.due(Mark(0, update, 0, update / 1e6))] == [10, 20, 30]


def test_what_has_not_been_done_yet_is_due_at_once() -> None:
    assert Pace(Duration.parse("1h")).due(Mark(0, 0, 0, 0.0))
