"""Workers without a server: what each changes reaches all others once, and all end with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Make
from contexts import context
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import run, words
from virtual import engine, together

from nmt_train.codec.config import ThresholdConfig
from nmt_train.codec.strom_threshold import GRAIN
from nmt_train.common.errors import UserError
from nmt_train.modes.table import Peers
from nmt_train.optim.config import OptimizerConfig
from nmt_train.optim.optimizer import Optimizer
from nmt_train.simulation.cluster import Cost, DeviceConfig
from nmt_train.simulation.virtual_transport import VirtualTransport
from nmt_train.strategy.config import PeersConfig
from nmt_train.strategy.plan import PeersPlan
from nmt_train.strategy.strom import Strom
from nmt_train.training.recovery_plan import Inventory

ELEMENTS, STEPS = 31, 5
START = torch.linspace(-1, 1, ELEMENTS)


class Given(Strom):
    """Sends given updates instead of those of its own optimizer."""

    def send(self, update: torch.Tensor) -> torch.Tensor:
        """Returns the worker's parameters."""
        self._flat.gradient += update * self.accumulator.add(1)
        self.step()
        return self._flat.parameters

    def refreshed(self) -> torch.Tensor:
        self.refresh()
        return self._flat.parameters


def strategy(transport: VirtualTransport, config: ThresholdConfig, own_updates: bool = False) -> Given:
    peers, plain = PeersConfig(own_updates=own_updates), OptimizerConfig(clip_norm=0)
    made_of = context(transport, START, Peers("threshold"), threshold=config, peers=peers, optimizer=plain)
    assert isinstance(made_of.plan.family, PeersPlan)
    made = Given(made_of, made_of.plan.family)
    made._worker_optimizer.step = lambda gradient, start, updates: None  # type: ignore[method-assign]
    return made


def updates(rank: int, seed: int) -> torch.Tensor:
    return 0.2 * torch.randn(STEPS, ELEMENTS, generator=torch.Generator().manual_seed(1000 * rank + seed))


def changed(nodes: list[int], seed: int, config: ThresholdConfig) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of every rank, after all gave their updates away at their own pace: its parameters, and what it did not send."""

    def work(transport: VirtualTransport) -> tuple[torch.Tensor, torch.Tensor]:
        made = strategy(transport, config)
        made.refresh()
        for number, update in enumerate(updates(transport.rank, seed)):
            transport.spend("forward", 100 * (number + 1) * (transport.rank + 1))
            made.send(update)
        return made.refreshed(), made.state().unsent

    costs = DeviceConfig(forward=Cost(0.01, 1e-4), backward=Cost(0.0, 0.0), update=Cost(0.0, 0.0))
    return together(engine(nodes, seed, device=costs), *[work] * sum(nodes))


@pytest.mark.slow
@settings(max_examples=60)
@given(
    nodes=st.lists(st.integers(1, 3), min_size=1, max_size=3), seed=st.integers(0, 10**6),
    tau=st.sampled_from([None, 0.01, 0.3]), coding=st.sampled_from(["words", "golomb-rice"]),
)  # fmt: skip
def test_all_have_the_same_bits_once_all_has_arrived(nodes: list[int], seed: int, tau: float | None, coding: Any) -> None:
    found = changed(nodes, seed, ThresholdConfig(tau=tau, density=0.2, coding=coding))
    assert all(torch.equal(own, found[0][0]) for own, _ in found)
    given_away = sum((updates(rank, seed).sum(0) for rank in range(len(found))), torch.zeros(ELEMENTS))
    unsent = sum((owed for _, owed in found), torch.zeros(ELEMENTS))
    torch.testing.assert_close(found[0][0], START + given_away - unsent, rtol=0, atol=1e-5)


def test_with_own_updates_a_worker_continues_from_the_replica_and_what_it_has_not_sent() -> None:
    def work(transport: VirtualTransport) -> None:
        made = strategy(transport, ThresholdConfig(tau=0.3), own_updates=True)
        made.refresh()
        for update in updates(transport.rank, seed=1):
            torch.testing.assert_close(made.send(update), made.optimizer.parameters + made.state().unsent)
        own = made.refreshed()
        assert made.state().unsent.any()
        torch.testing.assert_close(own, made.optimizer.parameters + made.state().unsent)

    together(engine([1, 1]), work, work)


def test_a_copy_of_the_parameters_does_not_change_later() -> None:
    def work(transport: VirtualTransport) -> None:
        made = strategy(transport, ThresholdConfig(tau=0.3))
        made.refresh()
        copied = made.copy().result()
        own = made.send(torch.ones(ELEMENTS))
        torch.testing.assert_close(copied, START)
        torch.testing.assert_close(own, START + 0.3)

    together(engine([1, 1]), work, work)


def test_nobody_waits_for_anybody() -> None:
    def work(transport: VirtualTransport) -> float:
        made = strategy(transport, ThresholdConfig())
        made.refresh()
        start = transport.now()
        for update in updates(transport.rank, 1):
            transport.spend("forward", 1 if transport.rank else 100)
            made.send(update)
        return transport.now() - start

    costs = DeviceConfig(forward=Cost(0.0, 1.0), backward=Cost(0.0, 0.0), update=Cost(0.0, 0.0))
    assert together(engine([1, 1], device=costs), work, work) == [100.0 * STEPS, 1.0 * STEPS]


def test_replicas_that_have_come_apart_are_found_at_the_next_checkpoint() -> None:
    def work(transport: VirtualTransport) -> None:
        made = strategy(transport, ThresholdConfig())
        made.refresh()
        if transport.rank == 1:
            made._sums[7] += 2**-10
        made.refresh()

    with pytest.raises(UserError, match="have different parameters"):
        together(engine([1, 1, 1]), *[work] * 3)


def test_after_equally_many_changes_that_are_not_the_same_all_take_one_replica() -> None:
    """Who ended may have told some of the others what it has not told the rest, who have changed more themselves."""

    def work(transport: VirtualTransport) -> dict[str, Any]:
        made = strategy(transport, ThresholdConfig())
        made.refresh()
        made._sums[transport.rank] += GRAIN
        made.optimizer.updates += 1
        return {"pieces": [piece.facts() for piece in made.pieces()]}

    said = together(engine([1, 1, 1]), *[work] * 3)
    moves = Inventory(said, ELEMENTS).plan([slice(0, ELEMENTS)] * 3)
    assert len(moves) == 3
    assert len({move.source.rank for move in moves}) == 1


@pytest.mark.slow
def test_every_batch_is_done_once(make: Make, tmp_path: Path) -> None:
    reference = run(make, tmp_path / "reference", [1], stop__after="2e")
    folder = run(make, tmp_path / "run", [2, 1], shuffle_seed=1, mode="strom", stop__after="2e")
    assert words(folder) == words(reference)


def test_the_running_mean_counts_the_updates_of_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: dict[int, int] = {}

    def smooth(its: Optimizer, times: int = 1) -> None:
        counted[id(its)] = counted.get(id(its), 0) + times

    monkeypatch.setattr(Optimizer, "smooth", smooth)
    changed([2, 1], 3, ThresholdConfig(density=0.2))
    assert set(counted.values()) == {3 * STEPS}
