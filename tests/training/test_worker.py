"""The loop of one worker: what it does with each batch, and what it says of itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import Make
from torch import Tensor, nn

from nmt_train.common.errors import NotFinite
from nmt_train.corpus.batch import Turn
from nmt_train.corpus.data_shard import DataShard, Position
from nmt_train.training.worker import Worker
from nmt_train.transport.local import LocalTransport


class Words:
    """A batch of this many words with this loss. A stream of them is an epoch of three."""

    def __init__(self, words: int, loss: float) -> None:
        self.target_tokens, self.source_tokens, self.loss = words, words, loss

    def __len__(self) -> int:
        return 1

    def to(self, device: torch.device) -> Words:
        return self


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(1))

    def loss(self, batch: Words) -> Tensor:
        return batch.loss * (self.value + 1).sum()


class Given:
    """Batches of these losses, three to an epoch; None: this worker has no batch in this turn."""

    def __init__(self, *losses: float | None) -> None:
        self.losses = losses

    def stream(self, data_shard: DataShard, position: Position) -> Iterator[Turn]:
        for number, loss in enumerate(self.losses[position.epochs * 3 + position.batches :]):
            yield Turn(None if loss is None else Words(number + 1, loss), number % 3 == 2)

    def epochs(self, length: Any) -> float:
        return math.inf

    def described(self, batch: Any) -> str:
        return f"the batch of {batch.target_tokens} words"


class Coordinator:
    """Ends training after the batches of `Given`. updated: of each step, whether there was an exchange."""

    def __init__(self, steps: int, after: Callable[[], None] = lambda: None) -> None:
        self._steps, self._after, self.updated, self.said = steps, after, list[bool](), list[str]()

    def should_continue(self) -> bool:
        return len(self.updated) < self._steps

    def step_done(self, updated: bool) -> None:
        self.updated.append(updated)
        self._after()

    def skipped(self, what: str) -> None:
        self.said.append(what)


def worker(make: Make, *losses: float | None, **changes: Any) -> Worker:
    config = make(**{"optimizer__name": "sgd", "optimizer__learning_rate": 0.1, "optimizer__warmup": 0, **changes})
    return Worker(config, LocalTransport(), Model(), Given(*losses))  # type: ignore[arg-type]


def test_every_batch_advances_the_position_and_an_epoch_begins_at_its_first_batch(make: Make) -> None:
    made, places = worker(make, 1.0, 1.0, 1.0, 1.0), list[tuple[int, int]]()
    made.run(Coordinator(4, lambda: places.append((made.position.epochs, made.position.batches))))
    assert places == [(0, 1), (0, 2), (1, 0), (1, 1)]
    assert made.progress.tokens == 1 + 2 + 3 + 4


def test_accumulated_batches_are_one_update(make: Make) -> None:
    made, coordinator = worker(make, 1.0, 1.0, 1.0, 1.0, batch__accumulate=2), Coordinator(4)
    made.run(coordinator)
    assert coordinator.updated == [False, True, False, True]
    assert made.strategy.updates == 2
    assert made.strategy.steps == {2: 2}


def test_a_turn_without_a_batch_is_an_exchange_only_where_all_workers_take_part(make: Make) -> None:
    for mode, updates in (("sync", 2), ("single", 1)):
        made = worker(make, 1.0, None, mode=mode)
        made.run(Coordinator(2))
        assert made.strategy.updates == updates, mode
        assert made.position.batches == 2


def test_a_batch_that_is_not_finite_is_skipped_and_named_and_training_goes_on(make: Make) -> None:
    made, coordinator = worker(make, 1.0, math.inf, 1.0, optimizer__not_finite="skip"), Coordinator(3)
    made.run(coordinator)
    assert made.strategy.updates == 2
    assert made.progress.skipped == 1
    assert coordinator.said == ["skipped: update 2, batch 2 of epoch 1 (the batch of 2 words): cost inf, gradient norm is inf"]
    assert torch.isfinite(made.flat.parameters).all()


def test_a_batch_that_is_not_finite_ends_training_with_what_to_do(make: Make) -> None:
    made = worker(make, 1.0, math.nan)
    with pytest.raises(NotFinite, match=r"update 2, batch 2 .* cost nan.*: lower optimizer.learning_rate or lengthen"):
        made.run(Coordinator(2))


def test_too_many_skips_in_a_row_end_training(make: Make) -> None:
    made, coordinator = worker(make, 1.0, *[math.nan] * 60, optimizer__not_finite="skip"), Coordinator(61)
    with pytest.raises(NotFinite, match="50 were skipped before it"):
        made.run(coordinator)
    assert len(coordinator.said) == 50


@pytest.mark.parametrize(("unsettled", "settled", "repeated"), [(0, 3, 0), (1, 2, 1), (2, 1, 2)])
def test_the_settled_position_leaves_out_exchanges_that_may_be_lost(
    make: Make, monkeypatch: pytest.MonkeyPatch, unsettled: int, settled: int, repeated: int
) -> None:
    made = worker(make, *[1.0] * 3)
    monkeypatch.setattr(type(made.strategy), "unsettled", unsettled)
    made.run(Coordinator(3))
    assert (made.settled_position.batches or 3 * made.settled_position.epochs, made.unsettled_batches) == (settled, repeated)


def test_the_learning_rate_decays_with_the_share_of_the_run_that_is_done(make: Make) -> None:
    made = worker(make, 1.0, optimizer__schedule="cosine", optimizer__cosine_until="4u")
    made.decay(0.5)
    assert made.strategy.optimizer.decayed == 0
    made.run(Coordinator(1))
    made.decay(0.5)
    assert made.strategy.optimizer.decayed == 0.25


def test_a_worker_is_too_far_ahead_one_epoch_before_the_slowest_and_at_the_end_of_training(make: Make) -> None:
    made = worker(make, 1.0, stop__after="5e")
    for epochs, slowest, waits in ((2, 1, False), (3, 1, True), (5, 4, True), (4, 4, False)):
        made.position = Position(epochs, 0)
        assert made.too_far_ahead(slowest) is waits, (epochs, slowest)
