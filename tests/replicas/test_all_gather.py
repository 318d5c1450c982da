"""Sums of messages that cannot be added on the way: each rank sends its own to all others (SparseLoCo, Sarfi et al. 2025)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Make
from contexts import context
from simulated import run
from virtual import engine, together

from nmt_train.codec.codec import Codec
from nmt_train.codec.config import TileConfig
from nmt_train.codec.dense import Dense
from nmt_train.codec.tile_topk import TileTopK
from nmt_train.common.message import Message
from nmt_train.modes.table import Replicas
from nmt_train.replicas.all_gather import GatherReducer
from nmt_train.replicas.local_sgd import LocalSGD
from nmt_train.replicas.reducer import Reduction
from nmt_train.run import checkpoint
from nmt_train.simulation.virtual_transport import VirtualTransport
from nmt_train.strategy.config import LocalConfig
from nmt_train.strategy.plan import LOCAL_STEPS, ReplicasPlan
from nmt_train.strategy.state import WorkerState, inherited, optimizer_to_shards
from nmt_train.trace import Trace

TILE = 4096


def reducer(transport: VirtualTransport, codec: Codec, config: TileConfig, elements: int) -> GatherReducer:
    return GatherReducer(transport, codec, config, torch.zeros(elements), Trace(False, transport))


def rounds(
    vectors: list[torch.Tensor], codec: TileConfig | Codec, weights: list[int] | None = None
) -> list[list[tuple[torch.Tensor, Reduction]]]:
    """What every rank has after each of several sums: vectors[round] has one row per rank."""
    config = codec if isinstance(codec, TileConfig) else TileConfig()

    def reduce(transport: VirtualTransport) -> list[tuple[torch.Tensor, Reduction]]:
        own = reducer(transport, TileTopK(config) if codec is config else codec, config, vectors[0].shape[1])  # type: ignore[arg-type]
        found = []
        for update, rows in enumerate(vectors):
            vector = rows[transport.rank].clone()
            joined = own.reduce(vector, update, weights[transport.rank] if weights else 1)
            found.append((vector, joined))
        return found

    return together(engine([1] * len(vectors[0])), *[reduce] * len(vectors[0]))


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("codec", [Dense(), TileConfig(keep=500)])
def test_every_rank_has_the_same_bits(codec: TileConfig | Codec) -> None:
    for each in zip(*rounds([draw(3, 5000), draw(3, 5000)], codec), strict=True):
        assert all(torch.equal(each[0][0], other) for other, _ in each)


def test_without_loss_it_is_the_weighted_sum() -> None:
    rows = draw(3, 50)
    found, joined = rounds([rows], Dense(), [2, 0, 5])[0][0]
    torch.testing.assert_close(found, 2 * rows[0] + 5 * rows[2])
    assert joined == Reduction(7.0, 7)


def spikes(*places: tuple[int, float]) -> torch.Tensor:
    """A vector of two tiles that is zero, but for 10 elements with this value or its negative from each of `places` on."""
    vector = torch.zeros(2 * TILE)
    for place, value in places:
        vector[place : place + 10] = value * torch.tensor([1.0, -1.0]).repeat(5)
    return vector


def test_workers_send_the_largest_of_every_tile_and_keep_the_rest_for_the_next_round_but_less_of_it() -> None:
    """The algorithm of the paper by hand; two bits hold one magnitude and its sign exactly."""
    config = TileConfig(keep=10, decay=0.5, rate=0.75)
    first = [spikes((0, 8), (50, 4), (TILE, 2)), spikes((100, 1), (TILE, 16), (TILE + 90, 8))]
    second = [spikes((200, 1), (TILE + 70, 1)), spikes((100, 1), (TILE, 1))]
    found = rounds([torch.stack(first), torch.stack(second)], config)[0]
    assert torch.equal(found[0][0], 0.75 * (spikes((0, 8), (TILE, 2)) + spikes((100, 1), (TILE, 16))))
    # Of the residual, half is left: 2 at place 50 of the first worker, and 4 at 90 of the other's second tile.
    assert torch.equal(found[1][0], 0.75 * (spikes((50, 2), (TILE + 70, 1)) + spikes((100, 1), (TILE + 90, 4))))
    assert found[0][1] == Reduction(2.0, 2)


def test_what_an_interrupted_round_sent_and_what_it_left_out_are_the_whole() -> None:
    """Whether or not the others have applied the message, nothing is counted twice: it is kept apart from the residual."""

    def reduce(transport: VirtualTransport) -> list[torch.Tensor]:
        config = TileConfig(keep=5, decay=1.0)
        own = reducer(transport, TileTopK(config), config, 5000)
        own.reduce(draw(2, 5000)[transport.rank].clone(), 0)
        assert own.unapplied is not None, "a sum that may come later than its messages"
        own.applied()
        assert own.unapplied is None
        before, vector = own.residual.clone(), draw(2, 5000)[transport.rank].clone()  # type: ignore[union-attr]
        own._gather = lambda message: (_ for _ in ()).throw(RuntimeError("ended"))  # type: ignore[method-assign]
        with pytest.raises(RuntimeError):
            own.reduce(vector.clone(), 1)
        assert own.unapplied is not None
        return [before + vector, own.residual + own.unapplied]  # type: ignore[operator]

    for whole, parts in together(engine([1, 1]), reduce, reduce):
        torch.testing.assert_close(whole, parts)


class Moved(LocalSGD):
    """Moves by given changes instead of local steps."""

    def exchange(self, change: torch.Tensor) -> None:
        self._flat.parameters += change
        self._work.begun = self._work._had_batch = True
        self._exchange()


def strategy(transport: VirtualTransport, elements: int, codec: str, rate: float = 1.0) -> Moved:
    row, tiles, local = Replicas("all-gather", LOCAL_STEPS, codec), TileConfig(rate=rate), LocalConfig(every=1)
    made_of = context(transport, torch.zeros(elements), row, tiles=tiles, local=local)
    assert isinstance(made_of.plan.family, ReplicasPlan)
    return Moved(made_of, made_of.plan.family)


def test_an_unsent_change_counts_as_it_would_if_it_was_sent() -> None:
    """Multiplied by the outer rate, which residuals and messages already contain."""

    def kept(transport: VirtualTransport) -> None:
        own, change = strategy(transport, 5000, "tile-top-k", rate=3.0), torch.linspace(-1, 1, 5000)
        own._flat.parameters += 1
        own._work.begun = True
        torch.testing.assert_close(own.state().unsent, torch.full((5000,), 3.0 / 2).double())
        own._flat.parameters -= 1
        own.exchange(change)
        torch.testing.assert_close(own.optimizer.parameters.double() + 2 * own.state().unsent, 3.0 * change.double())

    together(engine([1, 1]), kept, kept)


def test_a_change_that_another_run_left_counts_once_without_error_feedback() -> None:
    def kept(transport: VirtualTransport) -> None:
        own = strategy(transport, 50, "dense", rate=3.0)
        own.load(WorkerState(unsent=torch.full((50,), 3.0 / 2)))
        own.exchange(torch.zeros(50))
        torch.testing.assert_close(own.optimizer.parameters, torch.full((50,), 3.0))

    together(engine([1, 1]), kept, kept)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_residuals_add_the_same_to_the_parameters_with_any_number_of_workers(ranks: int) -> None:
    """A worker's residual counts as its share of a mean: of four, a quarter."""
    residuals = draw(4, 5000)

    def kept(transport: VirtualTransport) -> WorkerState:
        own = strategy(transport, 5000, "tile-top-k")
        own.load(WorkerState(unsent=residuals[transport.rank].double() / 4))
        torch.testing.assert_close(own._reducer.residual, residuals[transport.rank], rtol=0, atol=0)
        return own.state()

    states = together(engine([1] * 4), *[kept] * 4)
    total = sum(inherited(states, rank, range(ranks)).unsent for rank in range(ranks))
    torch.testing.assert_close(total, residuals.double().mean(0))
    vectors, _, _ = optimizer_to_shards({"parameters": torch.zeros(5000), "exp_avg": torch.zeros(5000)}, {}, states)
    torch.testing.assert_close(vectors["parameters"].double(), residuals.double().mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_residuals_of_gradients_add_the_same_to_a_mean_with_any_number_of_workers(ranks: int) -> None:
    residuals = draw(4, 5000)
    states = [WorkerState(residual=vector) for vector in residuals]
    found = [inherited(states, rank, range(ranks), means=True).residual for rank in range(ranks)]
    torch.testing.assert_close(sum(vector for vector in found if vector is not None) / ranks, residuals.mean(0))


def test_what_is_not_finite_on_one_rank_is_so_on_all_and_the_residual_stays() -> None:
    first, bad, last = draw(9, 5000).split(3)
    bad = bad.clone()
    bad[1, 7] = torch.inf
    config = TileConfig(decay=0.5)
    for found, without in zip(rounds([first, bad, last], config), rounds([first, last], config), strict=True):
        assert torch.isnan(found[1][0]).all()
        assert torch.equal(found[2][0], without[1][0])


@pytest.mark.parametrize("keep", [16, 64, 500])
def test_a_message_has_two_bits_per_sent_element_its_coded_position_and_a_table(keep: int) -> None:
    message, shape = (encode(draw(100 * TILE)) for encode in (encode_at_0(keep), TileTopK(TileConfig(keep=keep)).encode_shape))
    positions, codes, table = message.tensors
    share = keep / TILE
    entropy = -(share * math.log2(share) + (1 - share) * math.log2(1 - share)) / share  # bits per sent element
    assert entropy < 8 * len(positions) / (100 * keep) < 1.04 * entropy
    assert (len(codes), table.nbytes) == (100 * keep // 4, 100 * 4 * 2)
    assert [tensor.dtype for tensor in shape.tensors] == [tensor.dtype for tensor in message.tensors]
    assert shape.bytes == pytest.approx(message.bytes, rel=0.02)


def encode_at_0(keep: int) -> Callable[[torch.Tensor], Message]:
    return lambda vector: TileTopK(TileConfig(keep=keep)).encode(vector, 0)


def test_two_bits_are_the_means_of_four_bins() -> None:
    values = torch.tensor([9.0, 8.5, 1.0, -1.0, -1.2, -9.0, 0.5, 0.4])
    vector = torch.zeros(TILE)
    vector[100:108] = values
    decoded = torch.empty(TILE)
    codec = TileTopK(TileConfig(keep=8))
    codec.decode(codec.encode(vector, 0), decoded)
    away = values - values.mean()
    edges = torch.tensor([-1.5, 0.0, 1.5]) * away.square().mean().sqrt()
    for low, high in zip([-torch.inf, *edges], [*edges, torch.inf], strict=True):
        inside = (away >= low) & (away < high)
        if inside.any():
            expected = values[inside].mean().to(torch.bfloat16).float()
            assert torch.equal(decoded[100:108][inside], expected.expand(int(inside.sum())))


@pytest.mark.slow
def test_a_mode_that_sends_everything_is_local_sgd(make: Make, tmp_path: Path) -> None:
    """With a codec that loses nothing, gathering gives the same parameters as an all-reduce, up to the order of sums."""
    found, averaged = [], {"replicas__codec": "dense", "local__outer": "none", "local__delay": 0}
    for name, changes in (("local-sgd", {}), ("sparse-local", averaged)):
        folder = run(make, tmp_path / name, [1, 1], mode=name, **{"stop__after": "20u", **changes})
        found.append(checkpoint.load(folder / "last").tensors("parameters"))
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-4, atol=1e-5)
