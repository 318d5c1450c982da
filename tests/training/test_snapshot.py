"""A snapshot of any number of ranks is cut for any other, and nothing of it is lost."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nmt_train.corpus.data_shard import Position
from nmt_train.optim.flat_model import partition
from nmt_train.strategy.state import WorkerState
from nmt_train.training.snapshot import RankState, Snapshot

LAYOUTS = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(sorted)


def snapshot(nodes: list[int], elements: int) -> tuple[Snapshot, list[slice]]:
    torch.manual_seed(0)
    full = {"parameters": torch.randn(elements), "exp_avg": torch.randn(elements)}
    numbers = {"updates": 5, "torch": {"step": 5.0}}
    worker_state = [WorkerState(residual=torch.full((elements,), rank + 1.0)) for rank in range(len(nodes))]
    random = [{"cpu": torch.get_rng_state()} for _ in nodes]
    stages = [[Position(1, rank) for rank in range(len(nodes))]]
    return Snapshot(full, numbers, worker_state, random, stages), partition(elements, nodes)


@settings(max_examples=30)
@given(elements=st.integers(0, 50))
def test_a_part_that_is_longer_than_a_message_arrives_piece_by_piece(elements: int) -> None:
    numbers, steps = {"updates": 5}, WorkerState(residual=torch.randn(20), own={"steps": torch.tensor([7])})
    sent = RankState({"parameters": torch.randn(elements)}, steps, {"cpu": torch.get_rng_state()}, numbers, Position(1, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nmt_train.training.snapshot._PIECE", 8)
        messages = list(sent.messages())
        assert all(tensor.numel() <= 8 for message in messages[1:] for tensor in message.tensors)
        received = RankState.receive(iter(messages).__next__)
    assert (received.numbers, received.position) == (sent.numbers, sent.position)
    for group in ("shard", "worker_state", "random"):
        before, after = (getattr(its, group) for its in (sent, received))
        if group == "worker_state":
            before, after = before.vectors(), after.vectors()
        assert list(before) == list(after)
        assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)


@settings(max_examples=60)
@given(before=LAYOUTS, after=LAYOUTS, elements=st.integers(1, 50))
def test_shards_and_residuals_survive_another_layout(before: list[int], after: list[int], elements: int) -> None:
    whole, _ = snapshot(before, elements)
    shards = partition(elements, after)
    parts = whole.split(shards)
    for name in ("parameters", "exp_avg"):
        joined = torch.empty(elements)
        for part, place in zip(parts, shards, strict=True):
            joined[place] = part.shard[name]
        assert torch.equal(joined, whole.vectors[name])
    owed = sum(part.worker_state.residual for part in parts if part.worker_state.residual is not None)
    assert torch.equal(owed, sum(state.residual for state in whole.worker_state))


def test_updates_that_a_worker_owes_are_made_where_shards_optimize_and_gradients_wait() -> None:
    whole, _ = snapshot([0, 0, 1], 7)
    update = torch.linspace(0, 1, 7)
    owing = dataclasses.replace(whole, worker_state=[dataclasses.replace(state, unsent=update) for state in whole.worker_state])
    settled = owing.with_optimizer_at(exchanges_updates=False)
    torch.testing.assert_close(settled.vectors["parameters"], whole.vectors["parameters"] + 3 * update)
    assert [list(state.vectors()) for state in settled.worker_state] == [["residual"]] * 3
    kept = owing.with_optimizer_at(exchanges_updates=True)
    assert torch.equal(kept.vectors["parameters"], whole.vectors["parameters"])
    assert all(torch.equal(state.unsent, update) for state in kept.worker_state)


def test_shards_that_optimize_keep_their_optimizer_where_workers_have_one_as_well() -> None:
    whole, _ = snapshot([0, 1], 7)
    mixing = {"exp_avg": torch.zeros(7), "step": torch.tensor([9.0])}
    states = [dataclasses.replace(state, optimizer=mixing) for state in whole.worker_state]
    both = dataclasses.replace(whole, worker_state=states)
    settled = both.with_optimizer_at(exchanges_updates=False)
    assert torch.equal(settled.vectors["exp_avg"], whole.vectors["exp_avg"])
    assert settled.numbers == whole.numbers
    assert all("exp_avg" in state.optimizer for state in settled.worker_state)


def test_what_ranks_owe_that_do_not_exchange_goes_to_those_that_do() -> None:
    whole, shards = snapshot([0, 0, 1, 1], 7)
    parts = whole.split(shards, exchanging=[0, 2])
    assert [part.worker_state.residual is not None for part in parts] == [True, False, True, False]
    assert torch.equal(sum(part.worker_state.residual for part in (parts[0], parts[2])), torch.full((7,), 10.0))


def test_an_optimizer_moves_from_the_shards_to_the_workers_and_back() -> None:
    whole, _ = snapshot([0, 0, 1], 7)
    moved = whole.with_optimizer_at(exchanges_updates=True)
    assert set(moved.vectors) == {"parameters"}
    assert moved.numbers["torch"] == {}
    assert all(torch.equal(state.optimizer["exp_avg"], whole.vectors["exp_avg"]) for state in moved.worker_state)
    back = moved.with_optimizer_at(exchanges_updates=False)
    assert torch.equal(back.vectors["exp_avg"], whole.vectors["exp_avg"])
    assert back.numbers == whole.numbers
    assert [list(state.vectors()) for state in back.worker_state] == [["residual"]] * 3
