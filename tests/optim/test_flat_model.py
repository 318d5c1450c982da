from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import random_batch, random_model
from torch import nn

from nmt_train.common.errors import UserError
from nmt_train.corpus.vocabulary import PAD
from nmt_train.optim.flat_model import FlatModel, partition
from nmt_train.optim.muon import Matrix


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def test_the_vectors_are_the_models_own_parameters_and_gradients() -> None:
    model = network()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    flat = FlatModel(model)
    assert flat.parameters.numel() == 3 * 4 + 4 + 4 * 2 + 2
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
    model(torch.ones(5, 3)).sum().backward()
    assert torch.equal(flat.gradient, torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))  # type: ignore[union-attr]
    first = flat.gradient.clone()
    model(torch.ones(5, 3)).sum().backward()
    torch.testing.assert_close(flat.gradient, 2 * first)
    flat.parameters.fill_(1.0)
    assert all(bool((parameter == 1).all()) for parameter in model.parameters())


@pytest.mark.parametrize("tied", ["all", "target-output"])
def test_the_gradient_of_lookups_can_be_kept_apart_from_that_of_the_output_layer(tied: str) -> None:
    batch = random_batch(50)
    plain, apart = (FlatModel(random_model(50, tied=tied)) for _ in range(2))
    lookups = apart.separate_lookups()
    for flat in (plain, apart):
        flat.model.loss(batch).backward()
    looked_up = lookups.view(50, -1).any(1).nonzero().flatten().tolist()
    words = {*batch.target_in.flatten().tolist(), *(batch.source.flatten().tolist() if tied == "all" else [])}
    assert set(looked_up) == words - {PAD}
    whole = apart.gradient.clone()
    whole[: lookups.numel()] += lookups
    torch.testing.assert_close(whole, plain.gradient)


@pytest.mark.parametrize("watched", [False, True])
def test_in_bf16_gradients_are_added_in_fp32_to_the_vector(watched: bool) -> None:
    """Of several batches, with parameters that the caller changes between them; every slice is announced once for each."""
    batches = [random_batch(50, seed=seed) for seed in (1, 2)]
    flat, exact = FlatModel(random_model(50), "bf16"), FlatModel(random_model(50))
    computed: list[tuple[int, int]] = []
    if watched:
        flat.watch(lambda place: computed.append((place.start, place.stop)))
    for batch in batches:
        for its in (flat, exact):
            its.parameters += 0.01
            its.backward(its.loss(batch))
    assert flat.gradient.dtype == torch.float32
    assert float((flat.gradient - exact.gradient).norm() / exact.gradient.norm()) < 0.03
    assert len(set(computed)) == len(flat.layout) * watched == len(computed) / 2
    assert sum(stop - start for start, stop in set(computed)) == flat.parameters.numel() * watched


def test_a_change_too_small_for_bf16_is_not_lost() -> None:
    flat = FlatModel(random_model(50), "bf16")
    first = float(flat.parameters[-1])
    for _ in range(20):
        flat.parameters[-1] += 1e-4  # a bias of a norm: bf16 has 8 bits
        loss = flat.loss(random_batch(50))
    before = flat.parameters.clone()
    flat.backward(loss)
    with flat.using(torch.ones_like(before)):
        assert all(bool((parameter == 1).all()) for parameter in flat.model.parameters())
    assert torch.equal(flat.parameters, before)
    assert torch.equal(flat.loss(random_batch(50)), loss)
    assert float(flat.parameters[-1]) == pytest.approx(first + 20e-4, abs=1e-6)


def test_borrowed_values_are_given_back_bit_for_bit_even_after_an_error() -> None:
    model = network()
    flat = FlatModel(model)
    own = flat.parameters.clone()
    with pytest.raises(RuntimeError), flat.using(torch.zeros_like(own)):
        assert not any(bool(parameter.any()) for parameter in model.parameters())
        raise RuntimeError
    assert torch.equal(flat.parameters, own)


def test_named_tensors_load_back_and_those_of_another_model_are_refused() -> None:
    flat = FlatModel(network())
    saved = {name: tensor.clone() for name, tensor in flat.named(flat.parameters).items()}
    target = torch.zeros_like(flat.parameters)
    flat.load(saved, target, "here")
    assert torch.equal(target, flat.parameters)
    with pytest.raises(UserError, match="here: parameter 0.weight has another shape"):
        flat.load({**saved, "0.weight": torch.zeros(1, 3)}, target, "here")
    with pytest.raises(UserError, match="here: parameter 7.bias is in only one of"):
        flat.load({**saved, "7.bias": torch.zeros(1)}, target, "here")


@pytest.mark.slow
@settings(max_examples=200)
@given(st.integers(0, 10_000), st.lists(st.integers(1, 5), min_size=1, max_size=6), st.data())
def test_a_limited_number_of_ranks_holds_shards_one_of_each_node_first(
    elements: int, devices: list[int], data: st.DataObject
) -> None:
    nodes = [node for node, count in enumerate(devices) for _ in range(count)]
    most = data.draw(st.integers(1, len(nodes) + 1))
    shards = partition(elements, nodes, most)
    if elements >= 36:  # enough for every one of at most 6 x 5
        holders = [nodes[rank] for rank, shard in enumerate(shards) if shard.start < shard.stop]
        assert len(holders) == min(most, len(nodes))
        assert len(set(holders)) == min(most, len(devices))
        assert shards[0].stop > shards[0].start == 0
    assert sorted((s.start, s.stop) for s in shards if s.start < s.stop) == sorted(
        (s.start, s.stop)
        for s in partition(elements, [nodes[r] for r, s in enumerate(shards) if s.start < s.stop])
        if s.start < s.stop
    )
    assert sum(shard.stop - shard.start for shard in shards) == elements


@settings(max_examples=200)
@given(st.integers(0, 10_000), st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_shards_tile_the_parameters_and_nodes_carry_the_same(elements: int, devices: list[int]) -> None:
    nodes = [node for node, count in enumerate(devices) for _ in range(count)]
    shards = partition(elements, nodes)
    ordered = sorted(shards, key=lambda shard: (shard.start, shard.stop))
    assert ordered[0].start == 0
    assert ordered[-1].stop == elements
    assert all(left.stop == right.start for left, right in pairwise(ordered))
    sizes = [sum(s.stop - s.start for s, its in zip(shards, nodes, strict=True) if its == node) for node in range(len(devices))]
    assert max(sizes) - min(sizes) <= 1
    for node in range(len(devices)):
        within = [s.stop - s.start for s, its in zip(shards, nodes, strict=True) if its == node]
        assert max(within) - min(within) <= 1


def test_ranks_of_a_node_need_not_be_neighbors() -> None:
    assert partition(8, (0, 1, 0, 1)) == [slice(0, 2), slice(4, 6), slice(2, 4), slice(6, 8)]


@given(
    nodes=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    shapes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(0, 9)), max_size=6),
)
def test_no_shard_has_only_a_part_of_a_matrix_that_must_stay_whole(
    nodes: list[int], shapes: list[tuple[int, int, int]]
) -> None:
    matrices, elements = [], 0
    for rows, columns, between in shapes:
        matrices.append(Matrix(elements + between, rows, columns))
        elements = matrices[-1].stop
    shards = [shard for shard in partition(elements, nodes, whole=matrices) if shard.start < shard.stop]
    assert sorted(place for shard in shards for place in range(shard.start, shard.stop)) == list(range(elements))
    for matrix in matrices:
        assert sum(shard.start < matrix.stop and matrix.start < shard.stop for shard in shards) == 1
