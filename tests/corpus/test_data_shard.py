"""Every batch of an epoch goes to exactly one worker, whatever the number of workers was before."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nmt_train.corpus.data_shard import DataShard, Position, resume


def done(
    total: int, size: int, stages: list[list[Position]], until: list[Position], redistribute: bool = False
) -> list[tuple[int, int]]:
    """The (epoch, batch) pairs that `size` workers take when worker w goes from its start to `until[w]`."""
    taken = []
    for rank in range(size):
        data_shard, position = resume(rank, stages, size, redistribute)
        for epoch in range(position.epochs, until[rank].epochs + 1):
            share = [number for number, *_ in data_shard.pick(epoch, iter(range(total)))]
            first = position.batches if epoch == position.epochs else 0
            last = len(share) if epoch < until[rank].epochs else until[rank].batches
            taken += [(epoch, number) for number in share[first:last]]
    return taken


def test_batch_i_goes_to_worker_i_mod_n() -> None:
    assert [number for number, *_ in DataShard(1, 3).pick(0, iter("abcdefgh"))] == [1, 4, 7]


@pytest.mark.slow
@settings(max_examples=200)
@given(
    total=st.integers(1, 30),
    sizes=st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=5),
    data=st.data(),
)
def test_other_numbers_of_workers_and_new_deals_lose_and_repeat_nothing(
    total: int, sizes: list[tuple[int, bool]], data: st.DataObject
) -> None:
    stages: list[list[Position]] = []
    taken: list[tuple[int, int]] = []
    for size, redistribute in sizes:
        starts = [resume(rank, stages, size, redistribute)[1] for rank in range(size)]
        until = []
        for rank, start in enumerate(starts):
            data_shard, _ = resume(rank, stages, size, redistribute)
            share = len(list(data_shard.pick(start.epochs, iter(range(total)))))
            batches = data.draw(st.integers(start.batches, share))
            ahead = data.draw(st.booleans())
            until.append(Position(start.epochs + 1, 0) if ahead or batches == share else Position(start.epochs, batches))
        taken += done(total, size, stages, until, redistribute)
        stages = [*resume(0, stages, size, redistribute)[0].stages, until]
    last = max(position.epochs for stage in stages for position in stage) + 1
    taken += done(total, 1, stages, [Position(last, 0)])
    assert sorted(taken) == [(epoch, batch) for epoch in range(last) for batch in range(total)]


def test_an_epoch_with_fewer_batches_than_workers_is_shared_all_the_same() -> None:
    shares = [[number for number, *_ in DataShard(rank, 4).pick(0, iter(range(2)))] for rank in range(4)]
    assert shares == [[0], [1], [], []]
