"""Sums over all ranks are right, the same everywhere, and no longer than need be; n workers train as one with all batches."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Make
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import run
from virtual import BANDWIDTH, LATENCY, engine, together

from nmt_train.codec.codec import Codec
from nmt_train.codec.dense import BFloat16, Dense
from nmt_train.codec.half import Half
from nmt_train.codec.int8 import Int8
from nmt_train.common.errors import UserError
from nmt_train.corpus.data_shard import DataShard
from nmt_train.replicas.butterfly import ButterflyAllReduce
from nmt_train.replicas.collective_all_reduce import CollectiveAllReduce
from nmt_train.replicas.reducer import EncodingReducer
from nmt_train.replicas.ring import RingAllReduce
from nmt_train.run import checkpoint
from nmt_train.simulation.virtual_transport import VirtualTransport
from nmt_train.strategy.replica_check import compare
from nmt_train.trace import Trace
from nmt_train.training.start import start


def library(vectors: torch.Tensor, nodes: list[int], codec: str = "dense") -> list[torch.Tensor]:
    """The same by the transport's own means."""

    def reduce(transport: VirtualTransport) -> torch.Tensor:
        own = vectors[transport.rank].clone()
        transport.spend("forward", transport.rank)  # they come one after the other
        CollectiveAllReduce(transport, "torch", codec, Trace(False, transport)).reduce(own, 1)
        return own

    return together(engine(nodes), *[reduce] * len(vectors))


def test_the_wires_own_sum_is_the_same_and_takes_as_long_as_a_ring() -> None:
    vectors = torch.randn(3, 30, generator=torch.Generator().manual_seed(1))
    for found in library(vectors, [1, 2]):
        torch.testing.assert_close(found, vectors.sum(0))
    for found in library(vectors, [1, 2], "bf16"):
        torch.testing.assert_close(found, vectors.bfloat16().float().sum(0), rtol=0, atol=2**-6)

    def seconds(transport: VirtualTransport) -> tuple[float, float]:
        times = []
        for reducer in (
            CollectiveAllReduce(transport, "torch", "dense", Trace(False, transport)),
            RingAllReduce(transport, Dense(), Trace(False, transport)),
        ):
            start = transport.now()
            reducer.reduce(torch.ones(40), 1)
            times.append(transport.now() - start)
        return times[0], times[1]

    room = engine([1, 1, 1, 1])
    room.network.scale = 1000.0
    for own, ring in together(room, *[seconds] * 4):
        assert own == pytest.approx(ring, rel=1e-6)


CODECS: dict[str, tuple[Codec, float]] = {  # with the largest error of one hop, as a share of the largest element
    "dense": (Dense(), 2**-22),
    "half": (Half(), 2**-10),
    "bf16": (BFloat16(), 2**-7),
    "int8": (Int8(), 2**-6),
}


ALGORITHMS = [RingAllReduce, ButterflyAllReduce]


def summed(
    algorithm: type[EncodingReducer], vectors: torch.Tensor, codec: Codec, nodes: list[int], seed: int | None = None
) -> list[torch.Tensor]:
    """What every rank has after the sum of the rows of `vectors`, one row a rank."""

    def reduce(transport: VirtualTransport) -> torch.Tensor:
        own = vectors[transport.rank].clone()
        algorithm(transport, codec, Trace(False, transport)).reduce(own, 1)
        return own

    return together(engine(nodes, seed), *[reduce] * len(vectors))


@pytest.mark.slow
@settings(max_examples=60)
@given(nodes=st.lists(st.integers(1, 3), min_size=1, max_size=3), elements=st.integers(0, 40), seed=st.integers(0, 99))
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_rank_has_the_same_bits_and_they_are_the_sum(
    algorithm: type[EncodingReducer], name: str, nodes: list[int], elements: int, seed: int
) -> None:
    codec, error = CODECS[name]
    vectors = torch.randn(sum(nodes), elements, generator=torch.Generator().manual_seed(seed))
    found = summed(algorithm, vectors, codec, nodes, seed)
    assert all(torch.equal(found[0], other) for other in found)
    exact = vectors.double().sum(0)
    largest = float(vectors.abs().sum(0).max()) if elements else 0.0
    assert torch.allclose(found[0].double(), exact, rtol=0, atol=sum(nodes) * error * largest)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_rank_sends_twice_all_blocks_but_one(algorithm: type[EncodingReducer]) -> None:
    def reduce(transport: VirtualTransport) -> int:
        algorithm(transport, Dense(), Trace(False, transport)).reduce(torch.ones(40), 1)
        return sum(size for _, size in transport.sent.values())

    assert together(engine([1, 1, 1, 1]), *[reduce] * 4) == [2 * 3 * 10 * 4] * 4


def test_a_butterfly_waits_for_fewer_messages_than_a_ring() -> None:
    def seconds(transport: VirtualTransport) -> list[float]:
        times = []
        for algorithm in ALGORITHMS:
            start = transport.now()
            algorithm(transport, Dense(), Trace(False, transport)).reduce(torch.ones(8), 1)
            times.append(transport.now() - start)
        return times

    for ring, butterfly in together(engine([1] * 8), *[seconds] * 8):
        transfers = 2 * 7 / 8 * 32 / BANDWIDTH  # the same for both
        assert ring == pytest.approx(2 * 7 * LATENCY + transfers)
        assert butterfly == pytest.approx(2 * 3 * LATENCY + transfers)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", CODECS)
def test_what_is_not_finite_on_one_rank_is_so_on_all(algorithm: type[EncodingReducer], name: str) -> None:
    vectors = torch.ones(3, 6)
    vectors[1, 4] = torch.inf
    for found in summed(algorithm, vectors, CODECS[name][0], [1, 1, 1]):
        assert not torch.isfinite(found[4])


def test_replicas_that_differ_are_named() -> None:
    def look(transport: VirtualTransport) -> None:
        vector = torch.zeros(5)
        vector[3] = float(transport.rank == 2)
        compare(transport, vector)

    with pytest.raises(UserError, match=r"rank 2 \(host node2\) and rank 1 \(host node1\) have different parameters"):
        together(engine([1, 1, 1, 1]), *[look] * 4)


def test_an_even_deal_gives_everybody_as_many_batches() -> None:
    shares = [[batch for _, batch, _ in DataShard(rank, 3, even=True).pick(0, iter("abcdefg"))] for rank in range(3)]
    assert shares == [["a", "d", "g"], ["b", "e", None], ["c", "f", None]]
    assert [list(DataShard(rank, 3, even=True).pick(0, iter("abc"))) for rank in range(3)] == [
        [(0, "a", "a")],
        [(1, "b", "a")],
        [(2, "c", "a")],
    ]


def train(make: Make, folder: Path, nodes: list[int], **changes: Any) -> dict[str, torch.Tensor]:
    return checkpoint.load(run(make, folder, nodes, **changes) / "last").tensors("parameters")


def test_n_workers_are_one_worker_with_all_their_batches(make: Make, tmp_path: Path) -> None:
    """One rank that adds up two batches before each update takes the same ones as two ranks with one each."""
    same = {"model__dropout": 0.0, "stop__after": "8u", "batch__tokens": 300, "optimizer__name": "sgd", "seed": 3}
    two = train(make, tmp_path / "two", [1, 1], mode="sync", **same)
    one = train(make, tmp_path / "one", [1], mode="single", batch__accumulate=2, **same)
    for name, tensor in one.items():
        assert torch.allclose(tensor, two[name], rtol=0, atol=1e-5), name


def test_a_sum_that_is_not_finite_ends_training_with_a_sentence(make: Make, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gradient norm is"):
        run(
            make, tmp_path / "stops", [1, 1], mode="sync", optimizer__learning_rate=1e30, optimizer__warmup=0, stop__after="60u"
        )


@pytest.mark.slow
def test_workers_in_step_stop_at_an_epoch_with_every_batch_used(make: Make, tmp_path: Path) -> None:
    config = dataclasses.replace(make(mode="sync", stop__after="2e", batch__tokens=300), run=str(tmp_path / "alone"))
    assert start(config, False, False) == 0
    alone = (tmp_path / "alone" / "last").resolve()
    simulated = (run(make, tmp_path / "three", [2, 1], mode="sync", stop__after="2e", batch__tokens=300) / "last").resolve()
    one, three = (checkpoint.load(path).facts["progress"] for path in (alone, simulated))
    assert (one["tokens"], one["epochs"]) == (three["tokens"], three["epochs"])
