"""A measured profile of the device at hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from conftest import Make
from memory import MemoryTransport, together, transports

from nmt_train.codec.tile_topk import TileTopK
from nmt_train.common.message import Message
from nmt_train.simulation import codec_costs
from nmt_train.simulation.cluster import Cost
from nmt_train.simulation.profile import Effort, _carrying, measure, nothing, typical
from nmt_train.training.prepared_run import opened
from nmt_train.training.setup import maker
from nmt_train.transport.local import LocalTransport


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"mode": "sparse", "server__up": "half", "server__per": "node", "overlap__bound": 2},
        {"mode": "sync", "replicas__buckets": 4, "replicas__algorithm": "butterfly"},
    ],
    ids=["server", "replicas"],
)
def test_a_profile_has_a_price_for_all_kinds_of_work_whatever_is_configured(make: Make, changes: dict[str, Any]) -> None:
    config = make(**changes)
    with opened(config, False, False) as ready:
        worker = maker(config, torch.device("cpu"), ready.vocabulary, ready.stores)
        costs = vars(measure(config, worker, LocalTransport(), Effort(4), nothing))
    assert vars(costs.pop("carry")) == {"seconds": 0, "per_unit": 0}
    assert costs.pop("response") == 0
    assert costs.pop("parameters") == worker(config, LocalTransport()).flat.parameters.numel()
    codecs = costs.pop("codecs")
    assert set(codecs) == {"low-bit", "powersgd", "tile-top-k", "threshold", "half", "bf16"}
    assert all(cost.per_unit > 0 for its in codecs.values() for cost in (its.encode, its.decode))
    assert set(costs) == {"forward", "backward", "update", "encode", "decode", "swap"}
    assert all(cost.seconds >= 0 and cost.per_unit >= 0 and cost.seconds + cost.per_unit > 0 for cost in costs.values())


@pytest.mark.slow
def test_a_series_of_steps_ends_in_time_and_what_is_measured_is_said(make: Make) -> None:
    config, said = make(), list[str]()
    with opened(config, False, False) as ready:
        worker = maker(config, torch.device("cpu"), ready.vocabulary, ready.stores)
        costs = measure(config, worker, LocalTransport(), Effort(10**9, seconds=0.0), said.append)
    assert costs.forward.of(100) > 0
    assert said == [f"measuring how long this device takes: {kinds}" for kinds in (
        "forward, backward", "update, encode, decode", "swap", "low-bit, powersgd, tile-top-k, threshold, half, bf16"
    )]  # fmt: skip


@pytest.mark.slow
def test_what_codecs_encode_while_they_are_measured_has_few_equal_elements(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in training: tile-top-k takes longer with equal elements."""
    config, distinct = make(), list[float]()
    encode = TileTopK.encode_away

    def watched(codec: TileTopK, vector: torch.Tensor, update: int) -> Message:
        distinct.append(vector.unique().numel() / vector.numel())
        return encode(codec, vector, update)

    monkeypatch.setattr(TileTopK, "encode_away", watched)
    with opened(config, False, False) as ready:
        codec_costs.measure(config, maker(config, torch.device("cpu"), ready.vocabulary, ready.stores), LocalTransport(), 4)
    assert min(distinct) > 0.9


def test_where_memory_is_scarce_codecs_are_not_measured(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmt_train.simulation.codec_costs.device.memory", lambda own, devices, ranks: 1000)
    config, said = make(), list[str]()
    with opened(config, False, False) as ready:
        worker = maker(config, torch.device("cpu"), ready.vocabulary, ready.stores)
        assert not measure(config, worker, LocalTransport(), Effort(4), said.append).codecs
    assert said[-1].endswith("they will be charged as top-k")


def test_a_step_that_took_unusually_long_is_left_out() -> None:
    usual = [(100.0, 0.1), (200.0, 0.25), (50.0, 0.1)]
    assert typical([*usual, (100.0, 24.0)]) == usual
    assert typical(usual) == usual


@pytest.mark.slow
def test_several_ranks_measure_what_messages_cost_and_when_they_are_noticed(make: Make) -> None:
    config = make()
    with opened(config, False, False) as ready:

        def run(transport: MemoryTransport) -> tuple[Cost, float]:
            worker = maker(config, torch.device("cpu"), ready.vocabulary, ready.stores)  # its batches are for one thread
            return _carrying(config, worker, transport, Effort(3, settling=1, rounds=2), nothing)

        for carry, response in together(*[partial(run, transport) for transport in transports([0, 1])]):
            assert response > 0
            assert carry.seconds >= 0
            assert carry.per_unit >= 0
