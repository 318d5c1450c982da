"""Something new is one file and one row: a toy of every kind is registered in one place, and trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import Make
from pydantic import ValidationError
from simulated import run, words
from torch import Tensor

from nmt_train.common.errors import UserError
from nmt_train.distributed.codec import CODECS
from nmt_train.distributed.codec.dense import Dense
from nmt_train.distributed.exchange.parameter_server.update_rules import RULES, Asynchronous
from nmt_train.distributed.message import Message
from nmt_train.modes.resolve import resolve
from nmt_train.modes.table import MODES, Mode
from nmt_train.optim.torch_optimizers import OPTIMIZERS


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


TOYS: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "codec": (CODECS, Doubled, {"mode": "sync", "replicas__codec": "toy"}),
    "update rule": (RULES, Pairs, {"mode": "vanilla", "server__rule": "toy"}),
    "optimizer": (OPTIMIZERS, lambda config, parameter: torch.optim.SGD([parameter], lr=0.1), {"optimizer__name": "toy"}),
    "mode": (MODES, Mode("every-step", "server", "int8", "dense", "this test"), {"mode": "toy"}),
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
