"""Devices of a node that exchange together, in the simulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pulled import BY_SERVER, RATE, START, Vector, settings, strategy_of
from torch import Tensor
from virtual import engine, everybody_is_here, together

from nmt_train.optim.flat_model import FlatModel
from nmt_train.simulation.virtual_transport import VirtualTransport
from nmt_train.strategy.recovery_piece import RecoveryPiece
from nmt_train.strategy.state import WorkerState
from nmt_train.strategy.strategy import Strategy


def moved(
    mode: str, options: dict[str, Any], gradients: list[float], snapshot: int = -1, residual: float = 0.0
) -> list[tuple[float, int]]:
    """How far each of two slow and two quick ranks on two nodes moves the parameters, and the number of updates.

    gradients: of each step. snapshot: the step before which there is one. residual: what the first rank of each node owes.
    """
    chosen, room = settings(mode, {"server.per": "node", **options}), engine([2, 2])

    def rest(strategy: Strategy, transport: VirtualTransport) -> None:
        for do in (strategy.drain, strategy.prepare_snapshot):
            do()
            everybody_is_here(transport)

    def work(transport: VirtualTransport) -> tuple[Tensor, int]:
        flat = FlatModel(Vector())
        strategy = strategy_of(chosen, flat, transport)
        if residual and transport.rank % 2 == 0:
            strategy.load(WorkerState(residual=torch.full_like(START, residual)))
        strategy.refresh()
        everybody_is_here(transport)
        for step, gradient in enumerate(gradients):
            if step == snapshot:
                rest(strategy, transport)
            for _ in range(5 if transport.rank % 2 == 0 else 1):
                transport.spend("forward", 1)
            flat.gradient.add_(torch.full_like(START, gradient), alpha=strategy.accumulator.add(1))
            strategy.step()
        rest(strategy, transport)
        strategy.refresh()
        return flat.parameters - START, strategy.updates

    return [(float(change[0]), updates) for change, updates in together(room, *[work] * len(room.transports))]


@pytest.mark.parametrize("shards", [None, 1])
def test_a_snapshot_does_not_let_a_node_exchange_without_some_of_its_devices(shards: int | None) -> None:
    options, gradients = {"server.shards": shards}, [1.0] * 4
    assert moved("vanilla", options, gradients, snapshot=2) == moved("vanilla", options, gradients) == [(-8 * RATE, 8)] * 4


def test_an_unsent_gradient_of_an_earlier_mode_is_part_of_the_next_local_step() -> None:
    options = BY_SERVER | {"local.every": 1}
    expected = -8.0 * RATE * 2 / 2  # two residuals of 8, each of one of a node's two devices, whose changes are averaged
    assert [change for change, _ in moved("diloco-async", options, [0.0], residual=8.0)] == [pytest.approx(expected)] * 4


def test_what_a_rank_says_to_have_exactly_are_the_parameters_after_as_many_updates() -> None:
    """Every update moves all parameters by RATE. Only the first rank of a node gets answers from the shards itself."""
    chosen, room = settings("vanilla", {"server.per": "node"}), engine([2, 2])

    def work(transport: VirtualTransport) -> list[RecoveryPiece]:
        flat = FlatModel(Vector())
        strategy = strategy_of(chosen, flat, transport)
        strategy.refresh()
        everybody_is_here(transport)
        for _ in range(3):
            flat.gradient.add_(torch.ones_like(START), alpha=strategy.accumulator.add(1))
            strategy.step()
        strategy.drain()
        everybody_is_here(transport)
        return strategy.pieces()

    for pieces in together(room, *[work] * 4):
        assert len(pieces) > 1
        for piece in (piece for piece in pieces if piece.exact):
            torch.testing.assert_close(piece.vectors["parameters"], (START - RATE * piece.updates)[piece.place])


def test_survivors_of_a_node_continue_from_the_parameters_of_the_shards() -> None:
    """Not from those that they had received: these may have been lost with the shard that sent them."""
    chosen, room = settings("vanilla", {"server.per": "node"}), engine([2, 2])

    def work(transport: VirtualTransport) -> bool:
        made = strategy_of(chosen, FlatModel(Vector()), transport)
        made.refresh()
        everybody_is_here(transport)
        made.prepare_snapshot()
        assert made.state().vectors()
        made.load(made.rescue()[0])
        return made._client.restores  # type: ignore[attr-defined]

    assert together(room, *[work] * 4) == [False] * 4
