"""A worker whose exchange takes place in a background task."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from contexts import context
from virtual import engine, together

from nmt_train.codec.finite import finite
from nmt_train.common.errors import NotFinite
from nmt_train.modes.table import Server
from nmt_train.optim.config import OptimizerConfig
from nmt_train.server.overlap import Overlap
from nmt_train.strategy.config import OverlapConfig
from nmt_train.strategy.plan import ServerPlan
from nmt_train.trace import Trace
from nmt_train.transport import Event
from nmt_train.transport.local import LocalTransport


class Broken(RuntimeError):
    """What the exchange fails with."""


class Announced(Trace):
    """Sets an event when its task begins to wait."""

    def __init__(self, transport: Any, waits: Event) -> None:
        super().__init__(False, transport)
        self._waits = waits

    def span(self, name: str, work: float = 0.0, parts: float = 1) -> AbstractContextManager[None]:
        if name == "waiting":
            self._waits.set()
        return super().span(name, work, parts)


def work(transport: Any) -> None:
    """The exchange fails once the worker waits for it."""
    waits = transport.event()

    made_of = context(transport, torch.ones(3), Server("overlapped"), overlap=OverlapConfig(bound=1))
    made_of = dataclasses.replace(made_of, trace=Announced(transport, waits))
    assert isinstance(made_of.plan.family, ServerPlan)
    strategy = Overlap(made_of, made_of.plan.family)

    def broken(gradient: torch.Tensor, parameters: torch.Tensor, weight: int) -> None:
        waits.wait()
        raise Broken

    strategy._client.exchange = broken  # type: ignore[method-assign]
    assert strategy.step()  # gives the gradient to the background task
    strategy.step()


@pytest.mark.slow
def test_a_worker_that_waits_for_an_exchange_is_woken_if_it_fails() -> None:
    with pytest.raises(Broken):
        together(engine([1]), work)
    with pytest.raises(Broken):
        work(LocalTransport())


def test_an_update_that_is_not_finite_is_dropped_and_training_goes_on() -> None:
    """The gradient is finite, but the worker's optimizer made an infinite update of it, which nobody has got."""
    made_of = context(LocalTransport(), torch.ones(3), Server("overlapped"), optimizer=OptimizerConfig(clip_norm=0))
    assert isinstance(made_of.plan.family, ServerPlan)
    strategy, exchanged = Overlap(made_of, made_of.plan.family), list[float]()

    def exchange(payload: torch.Tensor, parameters: torch.Tensor, weight: int) -> None:
        finite(payload)
        exchanged.append(float(payload[0]))

    strategy._client.exchange = exchange  # type: ignore[method-assign]

    def prepare(gradient: torch.Tensor, parameters: torch.Tensor, weight: int) -> None:
        if gradient[0] == 2:
            gradient.fill_(torch.inf)

    strategy._client.prepare = prepare  # type: ignore[method-assign]
    skipped = 0
    for value in (1.0, 2.0, 3.0):
        made_of.flat.gradient += value * strategy.accumulator.add(1)
        try:
            strategy.step()
            strategy.drain()
        except NotFinite:
            skipped += 1
            strategy.drain()
        assert torch.isfinite(made_of.flat.parameters).all()
    assert (exchanged, skipped) == ([1.0, 3.0], 1)
