"""Something new is one file and one row: a toy of every kind is registered in one place, and trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import Make
from pydantic import ValidationError
from simulated import run, words
from torch import Tensor

from nmt_train.codec import CODECS
from nmt_train.codec.dense import Dense
from nmt_train.common.errors import UserError
from nmt_train.common.message import Message
from nmt_train.modes.resolve import resolve
from nmt_train.modes.table import MODES, Mode, Replicas, Server
from nmt_train.optim.torch_optimizers import OPTIMIZERS
from nmt_train.replicas import build as replicas
from nmt_train.replicas.all_gather import GatherReducer
from nmt_train.replicas.reducer import Reducer
from nmt_train.replicas.reducers import REDUCERS
from nmt_train.replicas.synchronous import Synchronous
from nmt_train.server import build as server
from nmt_train.server.every_step import EveryStep
from nmt_train.strategy.context import BuildContext
from nmt_train.strategy.plan import ReplicasPlan, ServerPlan
from nmt_train.strategy.update_rules import RULES, Asynchronous


class Doubled(Dense):
    """Sends twice the vector, and halves what arrives."""

    def encode(self, vector: Tensor, update: int) -> Message:
        return Message((), (2 * vector,))

    def decode(self, message: Message, into: Tensor) -> None:
        into.copy_(message.vector(into.numel()) / 2)


class Pairs(Asynchronous):
    """Updates with every second push."""

    @classmethod
    def build(cls, bundle: int, backup: int) -> Pairs:
        return cls(2)


class Everything(GatherReducer):
    """Gathers what it receives, without error feedback."""

    @classmethod
    def build(cls, context: BuildContext, settings: ReplicasPlan) -> Reducer:
        return cls(context.transport, Dense(), context.plan.codecs.tiles, context.flat.gradient, context.trace)


class Lazy(EveryStep):
    """Exchanges after every second step."""

    def __init__(self, context: BuildContext, settings: ServerPlan) -> None:
        super().__init__(context, settings)
        self._accumulate = 2


TOYS: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "codec": (CODECS, Doubled, {"mode": "sync", "replicas__codec": "toy"}),
    "update rule": (RULES, Pairs, {"mode": "vanilla", "server__rule": "toy"}),
    "optimizer": (OPTIMIZERS, lambda config, parameter, _: torch.optim.SGD([parameter], lr=0.1), {"optimizer__name": "toy"}),
    "mode": (MODES, Mode(Server(up="int8"), "this test"), {"mode": "toy"}),
}
PARTS: dict[str, tuple[dict[str, Any], Any, Mode]] = {
    "reducer": (REDUCERS, Everything, Mode(Replicas("toy"), "this test")),
    "cadence of replicas": (replicas.CADENCES, Synchronous, Mode(Replicas(cadence="toy"), "this test")),
    "cadence of a server": (server.CADENCES, Lazy, Mode(Server("toy"), "this test")),
}


@pytest.mark.parametrize("kind", TOYS)
def test_a_new_one_is_registered_in_one_place_and_trains(
    make: Make, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    registry, toy, options = TOYS[kind]
    with pytest.raises((UserError, ValidationError), match="toy"):
        resolve(make(**options))
    monkeypatch.setitem(registry, "toy", toy)
    options = {"mode": "vanilla", **options}
    assert words(run(make, tmp_path / "run", [1, 1], stop__after="12u", **options)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", PARTS)
def test_a_new_part_is_registered_in_one_place_and_trains_in_a_new_mode(
    make: Make, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    registry, toy, mode = PARTS[kind]
    monkeypatch.setitem(registry, "toy", toy)
    monkeypatch.setitem(MODES, "toy", mode)
    assert words(run(make, tmp_path / "run", [1, 1], stop__after="12u", mode="toy")) > 0
