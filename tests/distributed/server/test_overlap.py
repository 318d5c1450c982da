"""A worker whose exchange takes place in a background task."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from contexts import context
from virtual import engine, together

from nmt_train.distributed.config import OverlapConfig
from nmt_train.distributed.plan import ServerPlan
from nmt_train.distributed.server.overlap import Overlap
from nmt_train.distributed.transport import Event
from nmt_train.distributed.transport.local import LocalTransport
from nmt_train.modes.table import Server
from nmt_train.trace import Trace


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


def test_a_worker_that_waits_for_an_exchange_is_woken_if_it_fails() -> None:
    with pytest.raises(Broken):
        together(engine([1]), work)
    with pytest.raises(Broken):
        work(LocalTransport())
